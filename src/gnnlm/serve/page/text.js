// Characters, numbers and token texts, as they are shown.

// The server counts characters (code points), JavaScript counts UTF-16 units.
export class Characters {
  constructor(text) {
    this.text = text;
    this.places = null;
    if (/[\ud800-\udbff][\udc00-\udfff]/.test(text)) {
      this.places = [];
      for (let unit = 0; unit < text.length; unit += text.codePointAt(unit) > 0xffff ? 2 : 1) this.places.push(unit);
      this.places.push(text.length);
    }
  }

  slice(start, end) {
    const unit = (place) => (this.places ? this.places[Math.min(place, this.places.length - 1)] : place);
    return this.text.slice(unit(start), end === undefined ? undefined : unit(end));
  }
}

// The pieces of a text between offsets; tokens that share a character get it once, the last of them.
export function pieces(text, offsets) {
  const characters = new Characters(text);
  return offsets.map((start, place) => characters.slice(start, offsets[place + 1]));
}

// A token with what cannot be seen made visible: " the" is "·the".
export function visible(text) {
  if (text === "") return "(end)";
  const code = (sign) => `<0x${sign.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}>`;
  const spaces = (some) => "·".repeat(some.length);
  return text
    .replace(/\n/g, "↵")
    .replace(/\t/g, "⇥")
    .replace(/[\u0000-\u001f\u007f]/g, code)
    .replace(/^ +| +$/g, spaces);
}

// A token as it is spoken.
export function spoken(text) {
  if (text === "") return "the end of the text";
  if (text.trim() === "") return text.includes("\n") ? "line break" : "space";
  return text.trim();
}

export function percent(share) {
  const value = 100 * share;
  if (value > 0 && value < 0.001) return "<0.001%";
  if (value > 0 && value < 0.1) return `${Number(value.toPrecision(1))}%`;
  return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)}%`;
}

export const number = (value) => value.toLocaleString("en");
export const signed = (value, digits = 2) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
export const bytes = (value) =>
  value < 1000
    ? count(value, "byte")
    : value < 1e6
      ? `${(value / 1e3).toFixed(1)} kB`
      : `${(value / 1e6).toFixed(1)} MB`;
export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

export const NAMES = { base: "base", knn: "kNN", gnn: "GNN", gnn_knn: "GNN+kNN" };
export const nameOf = (predictor) => NAMES[predictor] ?? predictor;
export const usesShares = (predictor) => predictor.endsWith("knn"); // the others mix in nothing of the book's own words
