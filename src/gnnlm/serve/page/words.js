// A text whose words can be looked at one by one, with the mouse, by touch, or with the arrow keys. It reads as plain
// text: only the word that the keys are on is a button.

import { el } from "./dom.js";
import { spoken } from "./text.js";

const DWELL = 220; // milliseconds that the mouse rests on a word before it means it

export class Words {
  // `acts`: chosen(place), looked(place, "hover" or "focus"), left(), deeper(place) for the down key, label(place) for those who listen
  constructor(label, acts) {
    this.acts = acts;
    this.spans = [];
    this.texts = [];
    this.current = -1;
    this.timer = 0;
    this.root = el("div", { class: "words", role: "group", "aria-label": label });
    this.root.addEventListener("click", (event) => this.#at(event, (place) => this.choose(place)));
    this.root.addEventListener("pointerover", (event) => this.#hover(event));
    this.root.addEventListener("pointerleave", () => this.#leave());
    this.root.addEventListener("focusin", (event) => this.#at(event, (place) => this.acts.looked?.(place, "focus")));
    this.root.addEventListener("keydown", (event) => this.#key(event));
  }

  add(text) {
    const [, space, rest] = text.match(/^(\s*)([^]*)$/); // the space before a word is not shaded
    const span = el("span", { class: "word" }, rest ? space : "", el("span", { class: "ink" }, rest || space));
    span.dataset.place = this.spans.length;
    this.spans.push(span);
    this.texts.push(text);
    this.root.append(span);
    if (this.current < 0 && text !== "") this.#reach(this.spans.length - 1);
    return span;
  }

  cut(length) {
    for (const span of this.spans.splice(length)) span.remove();
    this.texts.length = Math.min(this.texts.length, length);
    if (this.current >= length) {
      this.current = -1;
      const last = this.texts.findIndex((text) => text !== "");
      if (last >= 0) this.#reach(last);
    }
  }

  // Puts the keys on a word.
  focus(place) {
    this.#reach(place);
    this.spans[place]?.focus({ preventScroll: false });
  }

  choose(place) {
    clearTimeout(this.timer); // whoever chooses a word has looked at it
    this.#reach(place);
    if (document.activeElement !== this.spans[place]) this.spans[place].focus({ preventScroll: true });
    this.acts.chosen?.(place);
  }

  mark(name, wanted) {
    this.spans.forEach((span, place) => span.classList.toggle(name, wanted(place)));
  }

  #reach(place) {
    const before = this.spans[this.current];
    for (const name of ["role", "tabindex", "aria-label"]) before?.removeAttribute(name);
    this.current = place;
    const span = this.spans[place];
    if (!span) return;
    span.setAttribute("tabindex", "0");
    span.setAttribute("role", "button");
    span.setAttribute("aria-label", this.acts.label?.(place) ?? spoken(this.texts[place]));
  }

  #at(event, act) {
    const span = event.target.closest(".word");
    if (span && this.root.contains(span)) act(Number(span.dataset.place));
  }

  #hover(event) {
    clearTimeout(this.timer);
    if (event.pointerType !== "mouse") return;
    this.#at(event, (place) => {
      this.timer = setTimeout(() => this.acts.looked?.(place, "hover"), DWELL);
    });
  }

  #leave() {
    clearTimeout(this.timer);
    this.acts.left?.();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.#move(this.current + step, step);
    else if (event.key === "Home") this.#move(0, 1);
    else if (event.key === "End") this.#move(this.spans.length - 1, -1);
    else if (event.key === "ArrowDown" && this.acts.deeper) this.acts.deeper(this.current);
    else if (event.key === "Enter" || event.key === " ") this.choose(this.current);
    else return;
    event.preventDefault();
  }

  #move(place, step) {
    while (this.texts[place] === "") place += step;
    if (place >= 0 && place < this.spans.length) this.focus(place);
  }
}
