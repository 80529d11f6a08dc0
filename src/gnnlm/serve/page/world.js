// What all views share: the run that is asked, its predictors, and what is looked up.

import { get } from "./api.js";
import { attachedName } from "./origin.js";

class World extends EventTarget {
  models = [];
  run = "";
  only = [];
  exclude = [];
  attached = []; // { name, text, size }, size in bytes; never changed, but replaced
  ownPast = false;

  async load() {
    this.models = (await get("v1/models")).data;
    this.run = this.runs[0];
  }

  get runs() {
    return [...new Set(this.models.map((model) => model.run))];
  }

  get predictors() {
    return this.models
      .filter((model) => model.run === this.run && model.id !== this.run)
      .map((model) => model.predictor);
  }

  get best() {
    return this.models.find((model) => model.id === this.run).predictor;
  }

  model(predictor) {
    return `${this.run}:${predictor}`;
  }

  // The fields of a request that say which documents are looked up.
  get lookup() {
    const given = {};
    if (this.attached.length) given.attach = this.attached.map(({ name, text }) => ({ name, text }));
    if (this.only.length) given.only = this.only;
    if (this.exclude.length) given.exclude = this.exclude;
    return given;
  }

  // The same for a text that may also be looked up itself.
  get reading() {
    return { ...this.lookup, ...(this.ownPast ? { own_past: true } : {}) };
  }

  // Attaches documents, [name, text] each; one of the same name is replaced.
  attach(documents) {
    const kept = new Map(this.attached.map((one) => [one.name, one]));
    for (const [name, text] of documents) kept.set(name, { name, text, size: new Blob([text]).size });
    this.attached = [...kept.values()];
    this.dispatchEvent(new Event("attached"));
  }

  detach(name) {
    this.attached = this.attached.filter((one) => one.name !== name);
    for (const kind of ["only", "exclude"]) this.restrict(kind, attachedName(name), false);
    this.dispatchEvent(new Event("attached"));
  }

  lookUpOwnPast(on) {
    this.ownPast = on;
    this.dispatchEvent(new Event("attached"));
  }

  choose(run) {
    this.run = run;
    this.only = [];
    this.exclude = [];
    this.dispatchEvent(new Event("run"));
    this.dispatchEvent(new Event("filter"));
  }

  restrict(kind, name, on = true) {
    const other = kind === "only" ? "exclude" : "only";
    this[kind] = this[kind].filter((one) => one !== name);
    if (on) {
      this[other] = this[other].filter((one) => one !== name);
      this[kind] = [...this[kind], name];
    }
    this.dispatchEvent(new Event("filter"));
  }

  clearFilter() {
    this.only = [];
    this.exclude = [];
    this.dispatchEvent(new Event("filter"));
  }
}

export const world = new World();
