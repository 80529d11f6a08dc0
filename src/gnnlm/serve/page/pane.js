// One text that is being written: its words, its figures, what can be done with it.

import { isAbort, post, stream } from "./api.js";
import { announce, button, el } from "./dom.js";
import { spokenTitle, trace } from "./origin.js";
import { SOURCES, spansOf, strong } from "./spans.js";
import { count, nameOf, number, percent, pieces, spoken, usesShares } from "./text.js";
import { Words } from "./words.js";
import { world } from "./world.js";

export class Pane {
  // `acts`: chosen(pane, place), looked(pane, place, how), deeper(pane, place), left(), changed(pane)
  constructor(predictor, acts) {
    this.predictor = predictor;
    this.acts = acts;
    this.tokens = []; // those of the prompt have `given`
    this.spans = [];
    this.options = {};
    this.earlier = []; // texts before an alternative was taken
    this.running = null;
    this.retry = () => this.goOn(); // what is tried again after an error
    this.frame = 0;
    this.figures = {};
    this.words = new Words(
      "The text. The left and right arrow keys move between words, the down arrow key lists other likely words, Enter opens the source.",
      {
        chosen: (place) => acts.chosen(this, place),
        looked: (place, how) => acts.looked(this, place, how),
        deeper: (place) => acts.deeper(this, place),
        left: () => acts.left(),
        label: (place) => this.describe(place),
      },
    );
    this.note = el("p", { class: "note", hidden: true });
    this.stats = el("dl", { class: "stats" });
    this.actions = el("div", { class: "bar actions" });
    const title = el("h2", { class: "pane-title" }, nameOf(predictor));
    this.root = el(
      "section",
      { class: "pane", "aria-label": `Text by ${nameOf(predictor)}` },
      el("div", { class: "pane-head" }, title, this.stats),
      this.words.root,
      this.note,
      this.actions,
    );
  }

  get busy() {
    return this.running !== null;
  }

  idsBefore(place) {
    return this.tokens.slice(0, place).map((token) => token.id);
  }

  textBefore(place) {
    return this.tokens
      .slice(0, place)
      .map((token) => token.text)
      .join("");
  }

  spanAt(place) {
    return this.spans.find((span) => span.first <= place && place <= span.last);
  }

  // What supports a word most: the passage that it is in, or a row.
  sourceOf(place) {
    return this.spanAt(place) ?? strong(this.tokens[place])[0];
  }

  describe(place) {
    const token = this.tokens[place];
    const word = spoken(token.text);
    if (token.given || !usesShares(this.predictor)) return word;
    const source = this.sourceOf(place);
    return `${word}, ${percent(token.book)} from the book${source ? `, source ${spokenTitle(source)}` : ""}`;
  }

  // Writes on from a prompt.
  async begin(prompt, options) {
    this.options = options;
    this.earlier = [];
    this.retry = () => this.begin(prompt, options);
    await this.#while(async (signal) => {
      const given = await post("tokenize", { model: world.run, prompt }, signal);
      const texts = pieces(prompt, given.offsets);
      this.#set(given.tokens.map((id, place) => ({ id, text: texts[place], given: true })));
      this.retry = () => this.goOn();
      await this.#write(signal);
    });
  }

  // Takes another word at a place, and writes on from there.
  async goOnFrom(place, candidate) {
    if (this.busy) await this.stop();
    this.earlier.push(this.tokens);
    const { log_probs: logProbs } = candidate;
    const chosen = {
      id: candidate.id,
      text: candidate.text,
      given: true,
      taken: true,
      log_prob: logProbs[this.predictor],
    };
    await this.#while(async (signal) => {
      this.#set([...this.tokens.slice(0, place), chosen]);
      await this.#write(signal);
    });
  }

  async goOn() {
    await this.#while((signal) => this.#write(signal));
  }

  back() {
    this.#set(this.earlier.pop());
    this.#say("");
    this.#finish();
  }

  async stop() {
    const going = this.running;
    going?.abort.abort();
    await going?.done;
  }

  async #while(work) {
    const abort = new AbortController();
    let end;
    this.running = { abort, done: new Promise((resolve) => (end = resolve)) };
    this.figures = { begin: performance.now(), tokens: 0, steps: 0 };
    this.#say("");
    this.root.setAttribute("aria-busy", "true");
    this.actions.replaceChildren();
    this.acts.changed(this);
    let failed = null;
    try {
      await work(abort.signal);
    } catch (error) {
      if (isAbort(error)) this.figures.ending = "stopped";
      else failed = error;
    }
    this.running = null;
    this.root.removeAttribute("aria-busy");
    if (failed) this.#fail(failed);
    this.#finish();
    end();
  }

  async #write(signal) {
    const ids = this.idsBefore(this.tokens.length);
    const { attached } = world;
    const body = {
      model: world.model(this.predictor),
      prompt: ids.length ? ids : "",
      stream: true,
      sources: SOURCES,
      ...this.options,
      ...world.reading,
    };
    for await (const { choices } of stream("v1/completions", body, signal)) {
      for (const choice of choices) this.#take(choice, attached);
    }
  }

  #take(choice, attached) {
    const now = performance.now();
    const details = choice.gnnlm;
    const figures = this.figures;
    if (details.tokens.length) {
      figures.steps += 1; // one chunk for each step, until the server says it
      figures.tokens += details.tokens.length;
      figures.first ??= { time: now, tokens: figures.tokens };
      figures.last = now;
      for (const token of details.tokens) trace(token.sources, attached);
      this.#append(details.tokens);
    }
    for (const name of ["steps", "searches"]) figures[name] = details[name] ?? figures[name];
    if (choice.finish_reason) figures.ending = choice.finish_reason;
    this.frame ||= requestAnimationFrame(() => this.#refresh()); // steps may come faster than pictures
  }

  #set(tokens) {
    const same = tokens.findIndex((token, place) => token !== this.tokens[place]);
    const kept = same < 0 ? tokens.length : same;
    this.words.cut(kept);
    this.tokens = tokens.slice(0, kept);
    this.#append(tokens.slice(kept));
  }

  #append(tokens) {
    for (const token of tokens) {
      this.tokens.push(token);
      const span = this.words.add(token.text);
      if (token.given) span.classList.add(token.taken ? "taken" : "given");
      else if (usesShares(this.predictor)) span.style.setProperty("--share", Math.min(1, token.book).toFixed(3));
    }
  }

  // Brings spans, figures and sources up to the last token.
  #refresh() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.spans = spansOf(this.tokens);
    const starts = new Set(this.spans.map((span) => span.first));
    const inSpan = new Set(
      this.spans.flatMap((span) => Array.from({ length: span.last - span.first + 1 }, (_, step) => span.first + step)),
    );
    this.words.mark("copied", (place) => inSpan.has(place));
    this.words.mark("first", (place) => starts.has(place));
    for (const kind of ["attached", "own"]) this.words.mark(kind, (place) => this.sourceOf(place)?.kind === kind);
    this.words.mark("joins", (place) => starts.has(place) && inSpan.has(place - 1));
    this.words.mark("voted", (place) => !inSpan.has(place) && strong(this.tokens[place]).length > 0);
    if (this.figures.tokens) this.#showFigures();
    this.acts.changed(this);
  }

  #showFigures() {
    const { begin, first, last, tokens, steps, searches } = this.figures;
    const later = first && tokens > first.tokens;
    const speed = later
      ? (tokens - first.tokens) / ((last - first.time) / 1000)
      : tokens / ((performance.now() - begin) / 1000);
    const written = this.tokens.filter((token) => !token.given);
    const book = written.reduce((sum, token) => sum + token.book, 0) / Math.max(1, written.length);
    const shown = [
      ["tokens", number(tokens)],
      ["tokens/s", speed.toFixed(1)],
      ["per step", (tokens / Math.max(1, steps)).toFixed(2)],
    ];
    if (searches !== undefined) shown.push(["searches", number(searches)]);
    if (usesShares(this.predictor)) shown.push(["from the book", percent(book)]);
    this.stats.replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  #finish() {
    const { ending, tokens } = this.figures;
    const act = (work) => () => work.call(this);
    const actions = [];
    if (this.tokens.length && ending !== undefined) actions.push(button("Go on", act(this.goOn)));
    if (this.earlier.length) actions.push(button("Back to the text before", act(this.back)));
    const how = { stop: "ended", length: "reached the token limit", stopped: "stopped" }[ending] ?? ending;
    if (ending)
      actions.push(
        el("span", { class: "quiet" }, `${how}${this.options.temperature ? `, seed ${this.options.seed}` : ""}`),
      );
    this.actions.replaceChildren(...actions);
    if (ending) announce(`${nameOf(this.predictor)}: ${count(tokens, "token")} written, ${how}.`);
    this.#refresh();
  }

  #fail(error) {
    const kept = this.figures.tokens
      ? ` The text written until then (${count(this.figures.tokens, "token")}) is kept.`
      : "";
    const wait = error.wait ? ` Wait ${count(Number(error.wait), "second")} before trying again.` : "";
    this.#say(
      `${error.message}${wait}${kept}`,
      button("Try again", () => this.retry()),
    );
  }

  #say(text, ...more) {
    this.note.hidden = text === "";
    this.note.replaceChildren(text, ...more);
    if (text) this.note.setAttribute("role", "alert");
    else this.note.removeAttribute("role");
  }
}
