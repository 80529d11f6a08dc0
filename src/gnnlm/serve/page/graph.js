// The view of one token's graph: what the network sees when it predicts that token, and where it looks.

import { isAbort, post } from "./api.js";
import { announce, byId, el, onSubmit, segments, sendWithKeys, svg } from "./dom.js";
import { spokenTitle, titleOf, trace } from "./origin.js";
import { frame, label } from "./plot.js";
import { count, percent, pieces, spoken, visible } from "./text.js";
import { Words } from "./words.js";
import { world } from "./world.js";

const CONTEXT = 10; // context nodes that are drawn
const NEIGHBOURS = 10;

export function startGraph({ openDocument }) {
  const out = byId("graph-out");
  const picture = el("div", { class: "picture" });
  let asking = null;
  let words = null;
  let given = { ids: [], texts: [] };

  async function read() {
    const prompt = byId("graph-text").value;
    await asked(out, async (signal) => {
      const found = await post("tokenize", { model: world.run, prompt }, signal);
      lay(found.tokens, pieces(prompt, found.offsets));
      await look(given.ids.length);
    });
  }

  // Shows a text; its words, and what comes after them, can be chosen.
  function lay(ids, texts) {
    given = { ids, texts };
    words = new Words("The text. Choose a word to see the graph that predicts it.", {
      chosen: look,
      label: (place) => (place < texts.length ? spoken(texts[place]) : "what comes next"),
    });
    [...texts, " … "].forEach((text) => words.add(text));
    words.spans.at(-1).classList.add("taken");
    picture.replaceChildren();
    out.replaceChildren(
      el(
        "p",
        { class: "quiet" },
        "Choose a word to see how it was predicted; the last symbol stands for the next word.",
      ),
      el("div", { class: "pane" }, words.root),
      picture,
    );
  }

  async function look(place) {
    words.mark("looked", (one) => one === place);
    await asked(picture, async (signal) => {
      const { attached } = world;
      const body = { model: world.run, prompt: given.ids.slice(0, place), ...world.lookup };
      const found = await post("v1/attention", body, signal);
      trace(found.neighbors, attached);
      draw(picture, found, given.texts[place] ?? null, openDocument);
      announce(
        `Graph of ${place < given.texts.length ? spoken(given.texts[place]) : "the next word"}: ${count(found.neighbors.length, "neighbour")}.`,
      );
    });
  }

  async function asked(place, work) {
    asking?.abort();
    asking = new AbortController();
    place.replaceChildren(el("p", { class: "quiet" }, "Looking up…"));
    try {
      await work(asking.signal);
    } catch (error) {
      if (!isAbort(error)) place.replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
    }
  }

  byId("graph-text").value = "Abstract base class for";
  sendWithKeys(byId("graph-text"));
  onSubmit(byId("graph-form"), read);
  world.addEventListener("run", () => out.replaceChildren());
  return (text, ids, texts, place) => {
    byId("graph-text").value = text;
    lay(ids, texts);
    return look(place);
  };
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

function draw(picture, found, target, openDocument) {
  const layers = found.by_neighbor.length;
  const choice = el("fieldset", { class: "segments" }, el("legend", { class: "unseen" }, "Attention of"));
  const place = el("div", {});
  const show = (layer) => {
    const chosen = layer === "all" ? [...Array(layers).keys()] : [Number(layer)];
    const nodes = found.neighbors.map((neighbour, one) => ({
      ...neighbour,
      attention: mean(chosen.map((number) => found.by_neighbor[number][one])),
      slots: found.by_slot[0][one].map((_, slot) => mean(chosen.map((number) => found.by_slot[number][one][slot]))),
    }));
    nodes.sort((a, b) => b.attention - a.attention);
    const context = found.context.map((token, one) => ({
      ...token,
      attention: found.by_context ? mean(chosen.map((number) => found.by_context[number][one])) : null,
    }));
    place.replaceChildren(...graphOf(context, nodes, target, openDocument));
  };
  segments(
    choice,
    "layer",
    [["all", "all layers"], ...found.by_neighbor.map((_, one) => [String(one), `layer ${one + 1}`])],
    "all",
    show,
  );
  show("all");
  const note = el(
    "p",
    { class: "quiet" },
    "Attention shows where the graph network looks. It is not a cause: a neighbour with much attention may change nothing.",
  );
  picture.replaceChildren(el("div", { class: "bar" }, choice), place, note);
}

function graphOf(context, nodes, target, openDocument) {
  if (!nodes.length) return [el("p", { class: "note" }, "No neighbours: no document may be looked up.")];
  const shown = nodes.slice(0, NEIGHBOURS);
  const rest = nodes.slice(NEIGHBOURS);
  const last = context.slice(-CONTEXT);
  const step = 40;
  const rows = Math.max(shown.length, last.length);
  const [width, height] = [940, rows * step + 56];
  const y = (place, size) => 50 + ((rows - size) * step) / 2 + place * step + step / 2 - 12;
  const middle = { x: 300, y: 50 + (rows * step) / 2 - 12 };
  const left = 130;
  const right = 460;
  const edges = [];
  const dots = [];
  last.forEach((token, place) => {
    const at = y(place, last.length);
    const weight = token.attention === null ? 1 : 1 + 9 * token.attention;
    edges.push(
      svg("path", { class: "edge intra", d: curve(left + 8, at, middle.x - 26, middle.y), "stroke-width": weight }),
    );
    dots.push(
      svg("circle", { class: "node context", cx: left, cy: at, r: 6 }),
      label(left - 16, at + 4, cut(visible(token.text), 14), "token", "end"),
    );
  });
  shown.forEach((node, place) => {
    const at = y(place, shown.length);
    edges.push(
      svg("path", {
        class: "edge inter",
        d: curve(right - 12, at, middle.x + 26, middle.y),
        "stroke-width": (1 + 14 * node.attention).toFixed(2),
      }),
    );
    node.slots.forEach((weight, slot) => {
      dots.push(
        svg("circle", {
          class: "node neighbour",
          cx: right + slot * 15,
          cy: at,
          r: (4 + 5 * Math.sqrt(Math.min(1, weight))).toFixed(2),
          "fill-opacity": (0.25 + 0.75 * Math.min(1, 2 * weight)).toFixed(2),
        }),
      );
    });
    const x = right + node.slots.length * 15 + 8;
    const words = svg(
      "text",
      { x, y: at - 2, class: "label" },
      cut(flat(node.before), 24, true),
      svg("tspan", { class: "strong" }, flat(node.token)),
      cut(flat(node.after), 20),
    );
    dots.push(words, label(x, at + 12, `${percent(node.attention)}, ${cut(spokenTitle(node), 44)}`, "faint"));
  });
  const centre = svg(
    "g",
    {},
    svg("circle", { class: "node target", cx: middle.x, cy: middle.y, r: 24 }),
    label(middle.x, middle.y + 4, cut(target === null ? "?" : visible(target), 7), "on-node", "middle"),
  );
  const heads = [
    label(left, 22, "context", "faint", "middle"),
    label(middle.x, 22, target === null ? "what comes next" : "predicted", "faint", "middle"),
    label(right, 22, "neighbours and their windows, by attention", "faint"),
  ];
  const said = `The graph of ${target === null ? "the next word" : spoken(target)}. Most attention: ${shown
    .slice(0, 3)
    .map((node) => `${percent(node.attention)} on ${spokenTitle(node)}`)
    .join(", ")}. All of it is in the table below.`;
  const drawn = el(
    "div",
    { class: "scrolls", tabindex: "0", role: "region", "aria-label": "The graph, drawn" },
    frame(width, height, said, ...edges, ...dots, centre, ...heads),
  );
  const notes = [];
  if (rest.length)
    notes.push(
      `${count(rest.length, "more neighbour")} with ${percent(rest.reduce((sum, node) => sum + node.attention, 0))} of the attention together.`,
    );
  if (context.length > last.length) notes.push(`The last ${last.length} of ${context.length} context nodes are drawn.`);
  if (last[0]?.attention === null) notes.push("Only edges from neighbours are as wide as their attention.");
  return [drawn, el("p", { class: "quiet" }, notes.join(" ")), tableOf(nodes, openDocument)];
}

function tableOf(nodes, openDocument) {
  const rows = nodes.map((node) => {
    const open = el(
      "button",
      { type: "button", class: "link", on: { click: () => openDocument(node.document, node) } },
      ...titleOf(node),
    );
    const words = el("td", { class: "passage" }, flat(node.before), el("mark", {}, flat(node.token)), flat(node.after));
    return el(
      "tr",
      {},
      el("td", {}, percent(node.attention)),
      el("td", {}, node.similarity.toFixed(3)),
      words,
      el("td", {}, open),
    );
  });
  const head = ["attention", "similarity", "passage", "document"].map((name) => el("th", { scope: "col" }, name));
  const table = el(
    "table",
    {},
    el("caption", { class: "unseen" }, "Neighbours by attention"),
    el("thead", {}, el("tr", {}, ...head)),
    el("tbody", {}, ...rows),
  );
  return el(
    "details",
    {},
    el("summary", {}, "As a table"),
    el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Neighbours" }, table),
  );
}

const flat = (text) => text.replace(/\s+/g, " ");

// At most so many characters; `end` keeps the last ones.
function cut(text, most, end = false) {
  const signs = [...text];
  if (signs.length <= most) return text;
  if (end)
    return `…${signs
      .slice(-most)
      .join("")
      .replace(/^\S+ (?=\S)/, "")}`; // no half word
  return `${signs
    .slice(0, most)
    .join("")
    .replace(/(\S) \S+$/, "$1")}…`;
}

function curve(x1, y1, x2, y2) {
  const middle = (x1 + x2) / 2;
  return `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
}
