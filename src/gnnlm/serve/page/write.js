// The view that writes: prompt, options, one text or two side by side, and their sources.

import { byId, el, onSubmit, segments, sendWithKeys } from "./dom.js";
import { Card } from "./card.js";
import { Pane } from "./pane.js";
import { Sources } from "./sources.js";
import { nameOf, usesShares } from "./text.js";
import { world } from "./world.js";

const EXAMPLE = "Abstract base class for";

export function startWrite({ showGraph }) {
  const sources = new Sources(byId("sources"));
  const card = new Card({
    alternative: (pane, place, candidate) => {
      card.hide();
      sources.clear();
      pane.goOnFrom(place, candidate);
      card.quietly(() => pane.words.focus(place));
    },
    graph: (pane, place) => {
      card.hide();
      showGraph(
        pane.textBefore(pane.tokens.length),
        pane.tokens.map((token) => token.id),
        pane.tokens.map((token) => token.text),
        place,
      );
    },
    source: (pane, place) => {
      card.hide();
      if (sources.open(pane, place)) byId("sources").scrollIntoView({ block: "nearest" });
    },
  });
  const small = matchMedia("(max-width: 56rem)");
  const acts = {
    chosen: (pane, place) => {
      const opened = sources.open(pane, place);
      if (small.matches || !opened) card.show(pane, place);
      else card.hide();
    },
    looked: (pane, place, how) => {
      if (how === "focus" || !pane.busy) card.show(pane, place); // words that come in under a resting mouse were not meant
    },
    deeper: (pane, place) => card.show(pane, place).then(() => card.enter()),
    left: () => card.leave(),
    changed: (pane) => {
      if (pane === (sources.pane ?? panes[0]) || !panes.includes(sources.pane)) sources.show(pane);
      if (!pane.busy) card.finished(pane);
      const busy = panes.some((one) => one.busy);
      byId("stop").hidden = !busy;
      byId("go").disabled = busy;
    },
  };
  let panes = [];
  let predictor = "";

  function arrange() {
    segments(
      byId("predictor"),
      "predictor",
      world.predictors.map((name) => [name, nameOf(name)]),
      predictor,
      (name) => {
        predictor = name;
        offerBeside();
      },
    );
    offerBeside();
  }

  function offerBeside() {
    const select = byId("beside");
    const before = select.value;
    const others = world.predictors.filter((name) => name !== predictor);
    select.replaceChildren(
      el("option", { value: "" }, "nothing"),
      ...others.map((name) => el("option", { value: name }, nameOf(name))),
    );
    select.value = others.includes(before) ? before : "";
  }

  function reset() {
    for (const pane of panes) pane.stop();
    panes = [];
    predictor = world.best;
    card.hide();
    sources.clear();
    byId("panes").replaceChildren(
      legend(),
      el(
        "p",
        { class: "quiet empty" },
        "The text appears here. Point at a word to see other likely words; choose the word to open its source.",
      ),
    );
    arrange();
  }

  async function write() {
    await Promise.all(panes.map((pane) => pane.stop()));
    card.hide();
    sources.clear();
    sources.pane = null;
    const wanted = [predictor, byId("beside").value].filter(Boolean);
    panes = wanted.map((name) => new Pane(name, acts));
    const sheet = el("div", { class: panes.length > 1 ? "sheets two" : "sheets" }, ...panes.map((pane) => pane.root));
    byId("panes").replaceChildren(legend(wanted), sheet);
    const given = options();
    await Promise.all(panes.map((pane) => pane.begin(byId("prompt").value, given)));
  }

  byId("prompt").value = EXAMPLE;
  sendWithKeys(byId("prompt"));
  onSubmit(byId("write-form"), write);
  byId("options").addEventListener("invalid", () => (byId("options").open = true), true); // a wrong field must be seen
  byId("stop").addEventListener("click", () => panes.forEach((pane) => pane.stop()));
  world.addEventListener("run", reset);
  reset();
}

// The options of a request. Without a seed, one is made up here, so that it can be told and two texts share it.
function options() {
  const value = (id) => byId(id).valueAsNumber;
  const seed = value("seed");
  const stops = byId("stops")
    .value.split("\n")
    .filter(Boolean)
    .map((stop) => stop.replaceAll("\\n", "\n"));
  return {
    temperature: value("temperature"),
    top_p: value("top-p"),
    max_tokens: value("max-tokens"),
    seed: Number.isNaN(seed) ? crypto.getRandomValues(new Uint32Array(1))[0] : seed,
    ...(stops.length ? { stop: stops } : {}),
  };
}

function legend(predictors = ["knn"]) {
  if (!predictors.some(usesShares))
    return el("p", { class: "legend quiet" }, "No shares: these predictors do not mix in the words of neighbours.");
  const steps = [0, 0.25, 0.5, 0.75, 1].map((share) =>
    el("span", { class: "swatch", vars: { "--share": share } }, "\u00a0"),
  );
  return el(
    "p",
    { class: "legend quiet" },
    "from the model ",
    ...steps,
    " from the book; ",
    el("span", { class: "sample copied" }, "copied passage"),
    ...(world.attached.length ? [", ", el("span", { class: "sample copied attached" }, "from what you attached")] : []),
    ...(world.ownPast ? [", ", el("span", { class: "sample copied own" }, "from this text itself")] : []),
    ", ",
    el("span", { class: "sample voted" }, "single word with a source"),
  );
}
