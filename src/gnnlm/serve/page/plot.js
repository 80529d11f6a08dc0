// Lines, intervals and dots, drawn by hand in SVG with the page's colours.

import { svg } from "./dom.js";

export const STYLES = { base: "line-base", knn: "line-knn", gnn: "line-gnn", gnn_knn: "line-both" };

// Round numbers that cover a range, about `wanted` of them.
export function ticks(low, high, wanted = 5) {
  const rough = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((one) => power * one >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, place) => (first + place) * step);
}

export const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);
export const line = (x1, y1, x2, y2, name) => svg("line", { x1, y1, x2, y2, class: name });
export const label = (x, y, text, name = "", anchor = "start") =>
  svg("text", { x, y, class: `label ${name}`, "text-anchor": anchor }, text);

export function frame(width, height, description, ...children) {
  return svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": description },
    ...children,
  );
}

// Labels at the right ends of lines, moved apart where they would overlap.
export function apart(places, gap = 15) {
  const sorted = places.map((y, index) => ({ y, index })).sort((a, b) => a.y - b.y);
  for (let one = 1; one < sorted.length; one += 1) sorted[one].y = Math.max(sorted[one].y, sorted[one - 1].y + gap);
  const found = [];
  for (const { y, index } of sorted) found[index] = y;
  return found;
}
