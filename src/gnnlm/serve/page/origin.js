// Where a source comes from: the store, a document that was attached, or the text itself.

import { el } from "./dom.js";

const PREFIX = "attached:";
const OWN = "own:text";

export const attachedName = (name) => `${PREFIX}${name}`; // what the server calls an attached document

// Gives sources that are not of the store their `kind`. Those of an attached document get the `text` in which they are
// opened: by then it may no longer be attached.
export function trace(sources, attached) {
  for (const source of sources) {
    const found = attached.find(({ name }) => source.document === attachedName(name));
    if (found) Object.assign(source, { kind: "attached", text: found.text });
    else if (source.document === OWN) source.kind = "own";
  }
}

// The name of a source's document, and a badge before it if it is not of the store.
export function titleOf({ document, kind }) {
  if (kind === "own") return [badge("this text"), "own past"];
  return kind === "attached" ? [badge("attached"), document.slice(PREFIX.length)] : [document];
}

// The same in plain words.
export function spokenTitle({ document, kind }) {
  if (kind === "own") return "this text";
  return kind === "attached" ? `${document.slice(PREFIX.length)}, attached` : document;
}

const badge = (text) => el("span", { class: "badge" }, text);
