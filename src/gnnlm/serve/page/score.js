// The view that scores: what the book does for each word of a text.

import { isAbort, post } from "./api.js";
import { announce, byId, el, onSubmit, segments, sendWithKeys, svg } from "./dom.js";
import { apart, frame, label, line, scale, STYLES, ticks } from "./plot.js";
import { Characters, count, nameOf, number, percent, signed, visible } from "./text.js";
import { Words } from "./words.js";
import { world } from "./world.js";

const FULL = 2; // nats of gain that are shown in full colour
const LEAST = 0.1; // and that are shown at all

export function startScore() {
  const out = byId("score-out");
  let asking = null;
  async function score() {
    asking?.abort();
    asking = new AbortController();
    out.replaceChildren(el("p", { class: "quiet", role: "status" }, "Scoring…"));
    try {
      const text = byId("score-text").value;
      const [found] = (await post("v1/score", { model: world.run, input: text, ...world.reading }, asking.signal)).data;
      show(out, text, found);
      announce(`${count(found.tokens.length, "token")} scored.`);
    } catch (error) {
      if (!isAbort(error)) out.replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
    }
  }
  sendWithKeys(byId("score-text"));
  onSubmit(byId("score-form"), score);
  world.addEventListener("run", () => out.replaceChildren());
}

function show(out, text, found) {
  const predictors = Object.keys(found.perplexity);
  const others = predictors.filter((name) => name !== "base");
  const detail = el("p", { class: "detail quiet" }, "Point at a word, or move between words with the arrow keys.");
  const curve = new Curve(found.tokens, others, (place) => look(place));
  const words = new Words("The text. The arrow keys move between words.", {
    looked: (place) => look(place),
    chosen: (place) => look(place),
    label: (place) => explain(found.tokens[place]),
  });
  shownTexts(text, found.tokens).forEach((some) => words.add(some));
  let predictor = others.at(-1);

  function look(place) {
    detail.textContent = explain(found.tokens[place]);
    words.mark("looked", (one) => one === place);
    curve.look(place);
  }

  function colour() {
    found.tokens.forEach((token, place) => {
      const gain = predictor === undefined ? 0 : gainOf(token, predictor);
      const { classList, style } = words.spans[place];
      classList.toggle("gain", gain > LEAST);
      classList.toggle("loss", gain < -LEAST);
      classList.toggle("much", Math.abs(gain) > Math.LN2);
      style.setProperty("--gain", Math.min(1, Math.abs(gain) / FULL).toFixed(3));
    });
  }

  colour();
  const parts = [el("div", { class: "pane" }, words.root), detail];
  const below = [totals(found, predictors)];
  if (others.length) {
    const choice = el("fieldset", { class: "segments" }, el("legend", { class: "unseen" }, "Colours show the gain of"));
    segments(
      choice,
      "score-predictor",
      others.map((name) => [name, nameOf(name)]),
      predictor,
      (name) => {
        predictor = name;
        colour();
      },
    );
    const legend = el(
      "p",
      { class: "legend quiet" },
      el("span", { class: "sample gain", vars: { "--gain": 0.6 } }, "likelier"),
      " and ",
      el("span", { class: "sample loss", vars: { "--gain": 0.6 } }, "less likely"),
      " than under base; ",
      el("span", { class: "sample gain much", vars: { "--gain": 0.6 } }, "twice"),
      " and ",
      el("span", { class: "sample loss much", vars: { "--gain": 0.6 } }, "half"),
      " as likely, or more so",
    );
    parts.unshift(el("div", { class: "bar" }, choice, legend));
    below.unshift(
      el(
        "figure",
        {},
        curve.root,
        el("figcaption", { class: "quiet" }, "Cumulative gain over base along the text, in nats."),
      ),
    );
  }
  out.replaceChildren(...parts, el("div", { class: "beside" }, ...below));
}

// What each token shows of the text; the bytes of one character may be several tokens, and the last of them shows it.
function shownTexts(text, tokens) {
  const characters = new Characters(text);
  return tokens.map(({ start, end }, place) =>
    start === tokens[place + 1]?.start ? "" : characters.slice(start, end),
  );
}

const gainOf = (token, predictor) => token.log_probs[predictor] - token.log_probs.base;

function explain(token) {
  const gain = (name) => (name === "base" ? "" : ` (${signed(gainOf(token, name))})`);
  const chances = Object.entries(token.log_probs).map(
    ([name, value]) => `${nameOf(name)} ${percent(Math.exp(value))}${gain(name)}`,
  );
  return `${visible(token.text)}: ${chances.join(", ")}`;
}

function totals(found, predictors) {
  const head = ["predictor", "perplexity", "nats", "gain", "helped", "hurt", "likeliest"];
  const rows = predictors.map((name) => {
    const size = found.tokens.length;
    const gains = found.tokens.map((token) => gainOf(token, name));
    const part = (wanted) => percent(gains.filter(wanted).length / size);
    const nats = found.tokens.reduce((sum, token) => sum + token.log_probs[name], 0);
    const base = name === "base";
    const cells = [
      found.perplexity[name] === null ? "infinite" : found.perplexity[name].toFixed(2),
      nats.toFixed(1).replace("-", "−"),
      base
        ? ""
        : signed(
            gains.reduce((sum, gain) => sum + gain, 0),
            1,
          ),
      base ? "" : part((gain) => gain > 0),
      base ? "" : part((gain) => gain < 0),
      percent(found.tokens.filter((token) => token.top1[name]).length / size),
    ];
    return el("tr", {}, el("th", { scope: "row" }, nameOf(name)), ...cells.map((cell) => el("td", {}, cell)));
  });
  const caption = el(
    "caption",
    {},
    `${number(found.tokens.length)} tokens. Gain: log-probability above base, in nats. Helped, hurt: tokens that became more or less likely. Likeliest: tokens to which the predictor gave the highest probability.`,
  );
  const table = el(
    "table",
    {},
    caption,
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows),
  );
  return el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Totals" }, table);
}

// The gain of each predictor, added up from the first token on.
class Curve {
  constructor(tokens, predictors, look) {
    const [width, height, left, right, top, bottom] = [600, 250, 46, 108, 12, 30];
    const sums = predictors.map((name) => {
      let sum = 0;
      return [0, ...tokens.map((token) => (sum += gainOf(token, name)))];
    });
    const all = [0, ...sums.flat()];
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const pad = (high - low) * 0.06 || 1;
    const x = scale(0, Math.max(1, tokens.length), left, width - right);
    const y = scale(low - pad, high + pad, height - bottom, top);
    this.x = x;
    this.cursor = line(0, top, 0, height - bottom, "cursor");
    this.cursor.setAttribute("visibility", "hidden");
    const grid = ticks(low, high, 4).flatMap((value) => [
      line(left, y(value), width - right, y(value), value === 0 ? "axis" : "grid"),
      label(left - 8, y(value) + 4, String(+value.toFixed(4)).replace("-", "−"), "", "end"),
    ]);
    const below = ticks(0, tokens.length, 6)
      .filter(Number.isInteger)
      .map((value) => label(x(value), height - 8, number(value), "", "middle"));
    const paths = sums.map((values, one) =>
      svg("path", {
        class: `line ${STYLES[predictors[one]]}`,
        d: values.map((value, place) => `${place ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`).join(""),
      }),
    );
    const ends = apart(sums.map((values) => y(values.at(-1))));
    const names = predictors.map((name, one) => label(width - right + 8, ends[one] + 4, nameOf(name), STYLES[name]));
    const said = predictors.map((name, one) => `${nameOf(name)} ${signed(sums[one].at(-1), 1)}`).join(", ");
    this.root = frame(
      width,
      height,
      `Cumulative gain over base, in nats: ${said}`,
      ...grid,
      ...below,
      ...paths,
      ...names,
      this.cursor,
    );
    this.root.addEventListener("pointermove", (event) => {
      const box = this.root.getBoundingClientRect();
      const place =
        Math.round(
          (((event.clientX - box.left) / box.width) * width - left) /
            ((width - right - left) / Math.max(1, tokens.length)),
        ) - 1;
      if (place >= 0 && place < tokens.length) look(place);
    });
  }

  look(place) {
    const at = this.x(place + 1);
    for (const name of ["x1", "x2"]) this.cursor.setAttribute(name, at);
    this.cursor.setAttribute("visibility", "visible");
  }
}
