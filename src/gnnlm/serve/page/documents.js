// The view of the store's documents: search, open, look up only some of them.

import { get, isAbort } from "./api.js";
import { byId, el, onSubmit } from "./dom.js";
import { Reader } from "./reader.js";
import { count, number } from "./text.js";
import { world } from "./world.js";

const PAGE = 100;

export function startDocuments() {
  const reader = new Reader("Choose a document to read it here.");
  byId("document").replaceChildren(reader.root);
  const list = byId("documents-list");
  let asking = null;
  let timer = 0;

  async function load(offset) {
    asking?.abort();
    asking = new AbortController();
    const search = byId("search").value.trim();
    try {
      const found = await get("v1/documents", { model: world.run, search, limit: PAGE, offset }, asking.signal);
      if (!offset) list.replaceChildren();
      list.append(...found.data.map(item));
      byId("documents-count").textContent = search
        ? `${count(found.total, "document")} with “${search}” in the name`
        : count(found.total, "document");
      byId("documents-more").hidden = list.children.length >= found.total;
      showFilter();
    } catch (error) {
      if (!isAbort(error)) byId("documents-count").textContent = error.message;
    }
  }

  function item({ name, tokens }) {
    const open = el("button", { type: "button", class: "link", on: { click: () => openHere(name) } }, name);
    const size = el("span", { class: "figure quiet" }, number(tokens), el("span", { class: "unseen" }, " tokens"));
    const only = toggle("Only", "only", name, `Look up only ${name}`);
    const exclude = toggle("Leave out", "exclude", name, `Leave out ${name}`);
    return el("li", { "data-name": name }, open, size, only, exclude);
  }

  function toggle(text, kind, name, label) {
    const act = () => world.restrict(kind, name, !world[kind].includes(name));
    return el(
      "button",
      {
        type: "button",
        class: "plain small",
        "aria-pressed": "false",
        "aria-label": label,
        "data-kind": kind,
        on: { click: act },
      },
      text,
    );
  }

  function showFilter() {
    for (const button of list.querySelectorAll("[data-kind]")) {
      const name = button.closest("li").dataset.name;
      button.setAttribute("aria-pressed", world[button.dataset.kind].includes(name));
    }
  }

  function openHere(name, place = null) {
    for (const one of list.children) one.classList.toggle("open", one.dataset.name === name);
    return reader.open(name, place);
  }

  byId("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => load(0), 200);
  });
  onSubmit(byId("documents-form"), () => load(0));
  byId("documents-more").addEventListener("click", () => load(list.children.length));
  world.addEventListener("filter", showFilter);
  world.addEventListener("run", () => {
    reader.close();
    load(0);
  });
  load(0);
  return openHere;
}
