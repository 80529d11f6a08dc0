// The view of the store's documents: search, open, look up only some of them; add and remove, where the server lets.

import { get, isAbort, post, put } from "./api.js";
import { button, byId, el, onSubmit } from "./dom.js";
import { Reader, forgetTexts } from "./reader.js";
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
      byId("add").hidden = !found.changeable;
      list.append(...found.data.map((one) => item(one, found.changeable)));
      byId("documents-count").textContent = search
        ? `${count(found.total, "document")} with “${search}” in the name`
        : count(found.total, "document");
      byId("documents-more").hidden = list.children.length >= found.total;
      showFilter();
    } catch (error) {
      if (!isAbort(error)) byId("documents-count").textContent = error.message;
    }
  }

  function item({ name, tokens, tags }, changeable) {
    const open = el("button", { type: "button", class: "link", on: { click: () => openHere(name) } }, name);
    const size = el("span", { class: "figure quiet" }, number(tokens), el("span", { class: "unseen" }, " tokens"));
    const only = toggle("Only", "only", name, `Look up only ${name}`);
    const exclude = toggle("Leave out", "exclude", name, `Leave out ${name}`);
    const marks = tags.map((tag) => toggle(tag, "only", `tag:${tag}`, `Look up only documents with the tag ${tag}`));
    const gone =
      changeable && button("Remove", () => remove(name), { class: "plain small", "aria-label": `Remove ${name}` });
    return el("li", { "data-name": name }, open, size, only, exclude, ...marks, gone);
  }

  async function change(work) {
    const note = byId("change-note");
    note.textContent = "…";
    try {
      const { generation, added, removed, overlapping } = await work();
      forgetTexts();
      const shared = overlapping.length ? ` ${overlapping.join(", ")} shares text with the test or valid split.` : "";
      note.textContent = `Generation ${generation}: added ${added}, removed ${removed}.${shared}`;
      await load(0);
      return true;
    } catch (error) {
      note.textContent = error.message;
      return false;
    }
  }

  function remove(name) {
    if (reader.name === name) reader.close();
    world.restrict("only", name, false);
    world.restrict("exclude", name, false);
    return change(() => post("v1/documents/remove", { model: world.run, names: [name] }));
  }

  onSubmit(byId("add-form"), async () => {
    const name = byId("add-name").value.trim();
    const tags = byId("add-tags")
      .value.split(",")
      .map((tag) => tag.trim())
      .filter(Boolean);
    const body = { model: world.run, documents: [{ name, text: byId("add-text").value }] };
    if (tags.length) body.tags = tags;
    const send = byId("add-replace").checked ? put : post;
    if (await change(() => send("v1/documents", body))) byId("add-form").reset();
  });

  function toggle(text, kind, name, label) {
    // `name` is a document's, or tag:T
    const act = () => world.restrict(kind, name, !world[kind].includes(name));
    return el(
      "button",
      {
        type: "button",
        class: "plain small",
        "aria-pressed": "false",
        "aria-label": label,
        "data-kind": kind,
        "data-filter": name,
        on: { click: act },
      },
      text,
    );
  }

  function showFilter() {
    for (const one of list.querySelectorAll("[data-kind]")) {
      one.setAttribute("aria-pressed", world[one.dataset.kind].includes(one.dataset.filter));
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
