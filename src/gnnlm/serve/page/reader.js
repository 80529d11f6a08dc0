// A document, opened at a place.

import { get, isAbort } from "./api.js";
import { button, el } from "./dom.js";
import { titleOf } from "./origin.js";
import { Characters, count } from "./text.js";
import { world } from "./world.js";

const KEPT = 16; // documents
const texts = new Map();

// After a change of the documents: a name may have another text.
export function forgetTexts() {
  texts.clear();
}

async function fetched(name, signal) {
  const key = `${world.run}\n${name}`;
  if (!texts.has(key)) {
    const found = await get("v1/documents/text", { model: world.run, name }, signal);
    texts.set(key, { characters: new Characters(found.text), tokens: found.tokens });
    if (texts.size > KEPT) texts.delete(texts.keys().next().value);
  }
  return texts.get(key);
}

export class Reader {
  constructor(empty) {
    this.empty = empty;
    this.root = el("div", { class: "reader" });
    this.asking = null;
    this.close();
  }

  close() {
    this.asking?.abort();
    this.name = null;
    this.root.replaceChildren(el("p", { class: "quiet" }, this.empty));
  }

  // `place` { start, end }: characters of the document that are marked and brought into view. A document that is not of
  // the store comes with its `kind` and `text`.
  async open(name, place = null, note = "") {
    this.asking?.abort();
    this.asking = new AbortController();
    this.name = name;
    const size = el("p", { class: "quiet" }, note);
    const body = el("div", { class: "document", tabindex: "0", role: "region", "aria-label": `Text of ${name}` }, "…");
    const filters = [
      button("Look up only this", () => world.restrict("only", name)),
      button("Leave it out", () => world.restrict("exclude", name)),
    ];
    const tools = el("div", { class: "bar" }, ...(place?.kind === "own" ? [] : filters)); // own rows are not filtered
    const title = el("h3", { class: "document-name" }, ...titleOf({ document: name, kind: place?.kind }));
    this.root.replaceChildren(title, size, tools, body);
    try {
      const { characters, tokens } = place?.kind
        ? { characters: new Characters(place.text) }
        : await fetched(name, this.asking.signal);
      if (!note && tokens !== undefined) size.textContent = count(tokens, "token");
      if (!place) {
        body.replaceChildren(characters.text);
        return;
      }
      const mark = el("mark", {}, characters.slice(place.start, place.end));
      body.replaceChildren(characters.slice(0, place.start), mark, characters.slice(place.end));
      body.scrollTop = mark.offsetTop - body.offsetTop - (body.clientHeight - mark.offsetHeight) / 2;
    } catch (error) {
      if (!isAbort(error)) body.replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
    }
  }
}
