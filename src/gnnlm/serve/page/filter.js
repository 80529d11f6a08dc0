// The bar that says which documents are looked up, and the fields that change it.

import { button, byId, el } from "./dom.js";
import { world } from "./world.js";

const KINDS = [
  ["only", "Only documents"],
  ["exclude", "Without documents"],
];

export function startFilter() {
  const bar = byId("filter");
  function show() {
    const chips = KINDS.flatMap(([kind]) => world[kind].map((name) => chip(kind, name)));
    bar.hidden = !chips.length;
    bar.replaceChildren(
      ...chips,
      button("Look up all", () => world.clearFilter(), { class: "plain small" }),
    );
  }
  byId("filter-fields").replaceChildren(...KINDS.map(([kind, label]) => field(kind, label)));
  world.addEventListener("filter", show);
  show();
}

function chip(kind, name) {
  const label = kind === "only" ? `No longer only ${name}` : `No longer without ${name}`;
  return el(
    "span",
    { class: "chip" },
    el("span", { class: "quiet" }, kind === "only" ? "only " : "without "),
    el("span", { class: "chip-name" }, name),
    el(
      "button",
      {
        type: "button",
        class: "chip-off",
        "aria-label": label,
        on: { click: () => world.restrict(kind, name, false) },
      },
      "×",
    ),
  );
}

function field(kind, label) {
  const input = el("input", {
    type: "text",
    spellcheck: "false",
    autocomplete: "off",
    maxlength: "1000",
    placeholder: "name, glob like email.*, tag:manual",
  });
  const add = () => {
    if (input.value.trim()) world.restrict(kind, input.value.trim());
    input.value = "";
    input.focus();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    add();
  });
  return el(
    "div",
    { class: "adds" },
    el("label", {}, label, input),
    button("Add", add, { "aria-label": `Add to: ${label}` }),
  );
}
