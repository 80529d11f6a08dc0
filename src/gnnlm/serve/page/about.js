// The view of the run's report: what the book brought on text that it had not seen.

import { get } from "./api.js";
import { byId, el, svg } from "./dom.js";
import { apart, frame, label, line, scale, STYLES, ticks } from "./plot.js";
import { count, nameOf, number, percent, signed } from "./text.js";
import { world } from "./world.js";

export function startAbout() {
  const out = byId("about-out");
  async function load() {
    out.replaceChildren(el("p", { class: "quiet" }, "…"));
    try {
      show(out, await get("v1/report", { model: world.run }));
    } catch (error) {
      out.replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
    }
  }
  world.addEventListener("run", load);
  load();
}

function show(out, report) {
  const rows = Object.entries(report.rows);
  const others = rows.filter(([name]) => name !== "base");
  const lead = `The run ${world.run}: the model ${report.model} with ${number(report.store_tokens)} tokens of ${count(report.split_documents.train, "document")} in the store, tested once on ${number(report.test_tokens)} tokens of ${count(report.test_documents, "other document")}.`;
  const parts = [el("p", {}, lead), table(rows)];
  parts.push(
    el(
      "p",
      { class: "quiet" },
      "Change: of perplexity against base, with its 95% interval by paired bootstrap over test documents. A change is significant if its interval does not contain 0. Helped and hurt: tokens whose probability rose or fell.",
    ),
  );
  if (others.length) {
    parts.push(
      el(
        "figure",
        {},
        intervals(others),
        el("figcaption", { class: "quiet" }, "Change of perplexity against base, with 95% intervals."),
      ),
    );
    const best = others.at(-1)[0];
    parts.push(
      el(
        "figure",
        {},
        perDocument(report.documents, best),
        el(
          "figcaption",
          { class: "quiet" },
          `Change of perplexity by test document, ${nameOf(best)} against base; bigger dots are longer documents.`,
        ),
      ),
    );
  }
  if (report.history.length > 1) {
    const caption = `Training of the graph network: perplexity on valid by step. Step ${number(report.training.best_step)} is used.`;
    parts.push(el("figure", {}, training(report.history), el("figcaption", { class: "quiet" }, caption)));
  }
  out.replaceChildren(...parts);
}

function table(rows) {
  const head = ["predictor", "perplexity", "95%", "change, 95%", "per word", "bits/byte", "helped", "hurt", "tokens/s"];
  const body = rows.map(([name, row]) => {
    const base = name === "base";
    const change = `${signed(100 * row.change, 1)}% (${signed(100 * row.change_low, 1)} to ${signed(100 * row.change_high, 1)})`;
    const cells = [
      row.ppl.toFixed(2),
      row.ppl_95.map((one) => one.toFixed(2)).join("–"),
      base ? "" : change,
      row.ppl_word?.toFixed(1) ?? "",
      row.bits_per_byte?.toFixed(3) ?? "",
      base ? "" : percent(row.helped),
      base ? "" : percent(row.hurt),
      row.tokens_per_second?.toFixed(0) ?? "",
    ];
    return el("tr", {}, el("th", { scope: "row" }, nameOf(name)), ...cells.map((cell) => el("td", {}, cell)));
  });
  const made = el(
    "table",
    {},
    el("caption", { class: "unseen" }, "The report"),
    el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...body),
  );
  return el("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "The report" }, made);
}

const shown = (value) => `${String(+(100 * value).toFixed(3)).replace("-", "−")}%`;

function axis(low, high, x, top, bottom) {
  return ticks(low, high, 6).flatMap((value) => [
    line(x(value), top, x(value), bottom, Math.abs(value) < 1e-9 ? "axis" : "grid"),
    label(x(value), bottom + 18, shown(value), "", "middle"),
  ]);
}

function intervals(rows) {
  const [width, step, left, right] = [760, 34, 120, 24];
  const low = Math.min(0, ...rows.map(([, row]) => row.change_low));
  const high = Math.max(0, ...rows.map(([, row]) => row.change_high));
  const pad = (high - low) * 0.05 || 0.01;
  const x = scale(low - pad, high + pad, left, width - right);
  const bottom = 12 + rows.length * step;
  const marks = rows.flatMap(([name, row], place) => {
    const y = 12 + place * step + step / 2;
    return [
      label(left - 14, y + 4, nameOf(name), "", "end"),
      line(x(row.change_low), y, x(row.change_high), y, `whisker ${STYLES[name]}`),
      svg("circle", { class: `dot ${STYLES[name]}`, cx: x(row.change), cy: y, r: 5.5 }),
    ];
  });
  const said = rows
    .map(
      ([name, row]) =>
        `${nameOf(name)} ${shown(row.change)}, from ${shown(row.change_low)} to ${shown(row.change_high)}`,
    )
    .join("; ");
  return frame(width, bottom + 28, `Change of perplexity: ${said}`, ...axis(low, high, x, 12, bottom), ...marks);
}

function perDocument(documents, best) {
  const [width, height, left, right] = [760, 120, 24, 24];
  const changes = documents.map((one) => ({
    name: one.name,
    tokens: one.tokens,
    change: one.ppl[best] / one.ppl.base - 1,
  }));
  const low = Math.min(0, ...changes.map((one) => one.change));
  const high = Math.max(0, ...changes.map((one) => one.change));
  const pad = (high - low) * 0.04 || 0.01;
  const x = scale(low - pad, high + pad, left, width - right);
  const longest = Math.max(...changes.map((one) => one.tokens));
  const dots = changes.map((one, place) => {
    const y = 22 + ((place * 37) % 64); // spread, so that dots can be told apart; height means nothing
    return svg(
      "circle",
      {
        class: "dot line-both see-through",
        cx: x(one.change),
        cy: y,
        r: (3 + 6 * Math.sqrt(one.tokens / longest)).toFixed(1),
      },
      svg("title", {}, `${one.name}: ${shown(one.change)}`),
    );
  });
  const better = changes.filter((one) => one.change < 0).length;
  return frame(
    width,
    height,
    `${better} of ${count(changes.length, "test document")} are predicted better than by base`,
    ...axis(low, high, x, 8, height - 26),
    ...dots,
  );
}

function training(history) {
  const [width, height, left, right, top] = [760, 200, 64, 72, 12];
  const bottom = height - 28;
  const curves = { base: "valid_base", gnn: "valid_gnn" };
  const values = Object.values(curves).flatMap((key) => history.map((entry) => Math.exp(entry[key])));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = scale(0, history.at(-1).step, left, width - right);
  const y = scale(low, high, bottom - 8, top + 8);
  const grid = [
    ...ticks(low, high, 4).flatMap((value) => [
      line(left, y(value), width - right, y(value), "grid"),
      label(left - 10, y(value) + 4, String(+value.toFixed(3)), "", "end"),
    ]),
    ...ticks(0, history.at(-1).step, 6).map((value) => label(x(value), height - 8, number(value), "", "middle")),
  ];
  const ends = apart(Object.values(curves).map((key) => y(Math.exp(history.at(-1)[key]))));
  const lines = Object.entries(curves).flatMap(([name, key], place) => [
    svg("path", {
      class: `line ${STYLES[name]}`,
      d: history.map((entry, one) => `${one ? "L" : "M"}${x(entry.step)} ${y(Math.exp(entry[key]))}`).join(""),
    }),
    label(width - right + 8, ends[place] + 4, nameOf(name), STYLES[name]),
  ]);
  const said = history.map((entry) => `step ${entry.step}: ${Math.exp(entry.valid_gnn).toFixed(2)}`).join("; ");
  return frame(width, height, `Perplexity on valid with the graph network: ${said}`, ...grid, ...lines);
}
