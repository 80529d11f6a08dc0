// What all views share: the run that is asked, its predictors, and which documents are looked up.

import { get } from "./api.js";

class World extends EventTarget {
  models = [];
  run = "";
  only = [];
  exclude = [];

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

  // The fields of a request that say which documents may be looked up.
  get filter() {
    const given = {};
    if (this.only.length) given.only = this.only;
    if (this.exclude.length) given.exclude = this.exclude;
    return given;
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
