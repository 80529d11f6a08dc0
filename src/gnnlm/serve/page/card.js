// What could stand at a place: the likeliest next words under each predictor, side by side.

import { isAbort, post } from "./api.js";
import { button, byId, el } from "./dom.js";
import { spokenTitle } from "./origin.js";
import { nameOf, percent, usesShares, visible } from "./text.js";
import { world } from "./world.js";

const TOP = 5;
const KEPT = 200; // answers

export class Card {
  // `acts`: alternative(pane, place, candidate), graph(pane, place), source(pane, place)
  constructor(acts) {
    this.acts = acts;
    this.root = byId("card");
    this.answers = new Map();
    this.at = null;
    this.asking = null;
    this.timer = 0;
    this.quiet = false;
    this.root.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.root.addEventListener("pointerleave", () => this.leave());
    this.root.addEventListener("focusout", () => this.leave());
    world.addEventListener("attached", () => {
      this.hide();
      this.answers.clear(); // their keys do not have the documents
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.#escape());
    // Not at pointerdown: without the card the page may be shorter, and what is being clicked would move away.
    document.addEventListener(
      "click",
      (event) => {
        if (!this.root.contains(event.target) && !event.target.closest(".word")) this.hide();
      },
      { capture: true },
    );
  }

  // Shows what could stand in a place; ends when the card is filled.
  async show(pane, place) {
    clearTimeout(this.timer);
    if (this.quiet) return;
    if (this.at?.pane !== pane || this.at.place !== place || this.root.hidden) this.filled = this.#look(pane, place);
    await this.filled;
  }

  async #look(pane, place) {
    this.at = { pane, place };
    this.early = pane.busy;
    pane.words.mark("looked", (one) => one === place);
    this.root.replaceChildren(
      this.#head(pane, place),
      el(
        "p",
        { class: "quiet" },
        pane.busy ? "Other likely words are shown when the text is finished." : "Looking up…",
      ),
    );
    this.#put(pane, place);
    if (pane.busy) return;
    this.asking?.abort();
    this.asking = new AbortController();
    try {
      const found = await this.#next(pane.idsBefore(place), this.asking.signal);
      if (this.at?.pane === pane && this.at.place === place) this.#fill(pane, place, found);
    } catch (error) {
      if (!isAbort(error) && this.at?.place === place) this.root.lastChild.textContent = error.message;
    }
    if (this.at?.pane === pane && this.at.place === place) this.#put(pane, place);
  }

  // Asks again for what could not be shown while the text was being written.
  finished(pane) {
    if (this.at?.pane !== pane || !this.early) return;
    const { place } = this.at;
    this.at = null;
    this.show(pane, place);
  }

  // Lets the keys come to a word without showing its card.
  quietly(act) {
    this.quiet = true;
    act();
    this.quiet = false;
  }

  // Puts the keys on the first alternative, unless they have gone elsewhere while it was looked up.
  enter() {
    if (!this.at || document.activeElement !== this.at.pane.words.spans[this.at.place]) return;
    this.root.querySelector(".alternative")?.focus();
  }

  // Hides in a moment, unless the mouse or the keys are on the card or its word by then.
  leave() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const on = document.activeElement;
      const held = this.root.contains(on) || on === this.at?.pane.words.spans[this.at.place];
      if (!held && !this.root.matches(":hover")) this.hide();
    }, 300);
  }

  hide() {
    clearTimeout(this.timer);
    this.asking?.abort();
    this.at?.pane.words.mark("looked", () => false);
    this.at = null;
    this.root.hidden = true;
  }

  #escape() {
    if (this.root.hidden) return;
    const { pane, place } = this.at;
    if (this.root.contains(document.activeElement)) pane.words.focus(place);
    this.hide();
  }

  async #next(ids, signal) {
    const body = { model: world.run, prompt: ids, top: TOP, ...world.reading };
    const key = JSON.stringify({ ...body, attach: undefined });
    if (!this.answers.has(key)) {
      const found = await post("v1/next", body, signal);
      this.answers.set(key, found);
      if (this.answers.size > KEPT) this.answers.delete(this.answers.keys().next().value);
    }
    return this.answers.get(key);
  }

  #head(pane, place) {
    const token = pane.tokens[place];
    const facts = [];
    if (token.log_prob !== undefined)
      facts.push(`${percent(Math.exp(token.log_prob))} likely under ${nameOf(pane.predictor)}`);
    if (!token.given && usesShares(pane.predictor)) facts.push(`${percent(token.book)} of that from the book`);
    const source = pane.sourceOf(place);
    if (source?.kind) facts.push(`source ${spokenTitle(source)}`);
    if (token.given) facts.push(token.taken ? "chosen by you" : "given");
    return el(
      "p",
      { class: "card-head" },
      el("b", { class: "token" }, visible(token.text)),
      el("span", { class: "quiet" }, facts.join(", ")),
    );
  }

  #fill(pane, place, found) {
    const byToken = new Map(found.data.map((candidate) => [candidate.id, candidate]));
    const here = pane.tokens[place].id;
    const columns = found.predictors.map((name) => {
      const ids = found.top[name].slice(0, TOP);
      if (!ids.includes(here) && byToken.has(here)) ids.push(here);
      const rows = ids.map((id) => this.#row(pane, place, byToken.get(id), name, id === here));
      return el(
        "div",
        { class: name === pane.predictor ? "column mine" : "column" },
        el("h3", {}, nameOf(name)),
        el("ul", {}, ...rows),
      );
    });
    const more = el("div", { class: "bar" });
    if (pane.spanAt(place) || pane.tokens[place].sources?.length)
      more.append(button("Show the source", () => this.acts.source(pane, place)));
    if (found.predictors.includes("gnn")) more.append(button("Show the graph", () => this.acts.graph(pane, place)));
    this.root.replaceChildren(this.#head(pane, place), el("div", { class: "columns" }, ...columns), more);
  }

  #row(pane, place, candidate, predictor, here) {
    const share = Math.exp(candidate.log_probs[predictor]);
    const rest = ` under ${nameOf(predictor)}${here ? ", as written" : ""}: go on from here`;
    const act = () => this.acts.alternative(pane, place, candidate);
    return el(
      "li",
      {},
      el(
        "button",
        {
          type: "button",
          class: here ? "alternative here" : "alternative",
          vars: { "--p": share.toFixed(4) },
          on: { click: act },
        },
        el("span", { class: "token" }, visible(candidate.text)),
        el("span", { class: "figure" }, percent(share)),
        el("span", { class: "unseen" }, rest), // the name that is heard begins with what is seen
      ),
    );
  }

  // Below the word, inside the window; small windows show it at their lower edge (parts.css).
  #put(pane, place) {
    this.root.hidden = false;
    const rects = pane.words.spans[place].getClientRects();
    const rect = rects[rects.length - 1];
    if (!rect) return;
    const width = this.root.offsetWidth;
    const left = Math.max(12, Math.min(rect.left - 24, document.documentElement.clientWidth - width - 12));
    this.root.style.setProperty("--x", `${left + scrollX}px`);
    this.root.style.setProperty("--y", `${rect.bottom + scrollY + 4}px`);
  }
}
