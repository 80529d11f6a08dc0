// The panel beside a text: the documents that support it, and the passage that was opened.

import { el } from "./dom.js";
import { titleOf } from "./origin.js";
import { Reader } from "./reader.js";
import { strong, supporters } from "./spans.js";
import { count, nameOf, percent, spoken, usesShares } from "./text.js";

const SHOWN = 8;

export class Sources {
  constructor(root) {
    this.reader = new Reader("Choose an underlined word, and its source is opened here.");
    this.list = el("ul", { class: "supporters" });
    this.lead = el("p", { class: "quiet" });
    this.pane = null;
    this.marked = null;
    this.all = false;
    root.replaceChildren(el("h2", {}, "Sources"), this.lead, this.list, this.reader.root);
  }

  // Shows the sources of a text, as far as it is written.
  show(pane) {
    if (pane !== this.pane) {
      this.#mark(null);
      this.pane = pane;
      this.all = false;
    }
    const found = supporters(pane.tokens);
    const words = pane.tokens.filter((token) => !token.given).length;
    this.lead.textContent = this.#summary(pane, found, words);
    const shown = this.all ? found : found.slice(0, SHOWN);
    const focused = document.activeElement?.dataset?.source;
    this.list.replaceChildren(...shown.map((one) => this.#item(one, words)));
    if (found.length > shown.length) {
      const more = el(
        "button",
        { type: "button", class: "plain", on: { click: () => this.#showAll() } },
        `Show ${found.length - shown.length} more`,
      );
      this.list.append(el("li", {}, more));
    }
    if (focused !== undefined)
      [...this.list.querySelectorAll("[data-source]")].find((one) => one.dataset.source === focused)?.focus();
    if (this.marked !== null) this.#mark(this.marked);
  }

  clear() {
    this.#mark(null);
    this.reader.close();
  }

  // Opens the source of a word; false if it has none.
  open(pane, place) {
    const span = pane.spanAt(place);
    const source = span ?? strong(pane.tokens[place])[0] ?? pane.tokens[place].sources?.[0];
    if (!source) return false;
    this.show(pane);
    pane.words.mark("open", (one) => (span ? span.first <= one && one <= span.last : one === place));
    const what = span
      ? `${count(span.last - span.first + 1, "token")} copied`
      : `the word “${spoken(pane.tokens[place].text)}”`;
    this.reader.open(
      source.document,
      this.#opened(source),
      `${what}, ${percent(source.share)} of ${span ? "their" : "its"} probability`,
    );
    return true;
  }

  #summary(pane, found, words) {
    if (!usesShares(pane.predictor))
      return `${nameOf(pane.predictor)} does not mix in the words of neighbours, so no source has a share.`;
    if (!words) return "The documents that support the text are listed here.";
    return found.length
      ? `${count(found.length, "document")} with a share of at least 5% in some word. Choose one to mark the words it supports.`
      : "No document has a share of 5% or more in any word.";
  }

  #item(one, words) {
    const pressed = this.marked === one.name;
    const act = () => {
      this.#mark(pressed ? null : one.name);
      this.show(this.pane);
      if (!pressed)
        this.reader.open(one.name, this.#opened(this.#best(one)), `supports ${count(one.words.size, "word")}`);
    };
    const button = el(
      "button",
      {
        type: "button",
        class: "supporter",
        "aria-pressed": pressed,
        "data-source": one.name,
        vars: { "--p": (one.words.size / words).toFixed(3) },
        on: { click: act },
      },
      el("span", { class: "supporter-name" }, ...titleOf({ document: one.name, kind: one.best.kind })),
      el("span", { class: "figure" }, count(one.words.size, "word")),
    );
    return el("li", {}, button);
  }

  // Where a document is opened: at the longest passage that was copied from it.
  #best(one) {
    const spans = this.pane.spans.filter((span) => span.document === one.name);
    return spans.sort((a, b) => b.last - b.first - (a.last - a.first))[0] ?? one.best;
  }

  // A place with the text it is in, if that is the text itself.
  #opened(source) {
    return source.kind === "own" ? { ...source, text: this.pane.textBefore(this.pane.tokens.length) } : source;
  }

  #mark(name) {
    this.marked = name;
    if (!this.pane) return;
    const words =
      name === null ? new Map() : (supporters(this.pane.tokens).find((one) => one.name === name)?.words ?? new Map());
    this.pane.words.mark("supported", (place) => words.has(place));
    this.pane.words.mark("open", () => false);
  }

  #showAll() {
    this.all = true;
    this.show(this.pane);
    this.list.querySelectorAll("button")[SHOWN]?.focus();
  }
}
