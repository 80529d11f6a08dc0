// What is looked up beside the store for this text only: documents that are attached, and the text's own past. The
// documents are kept in this tab, and go along with each request; the server forgets them with it.

import { announce, button, el } from "./dom.js";
import { bytes, count } from "./text.js";
import { world } from "./world.js";

const LARGEST = 64 * 2 ** 20; // bytes of a file that is read at all; what is too large for the server, it says itself
let trouble = []; // what is wrong with what was attached last
let made = 0; // fields, to tell their names apart

// Fills every place for it on the page; all show the same documents.
export function startAttach() {
  for (const root of document.querySelectorAll(".attach")) fill(root);
  const files = (event) => event.dataTransfer?.types.includes("Files");
  const dropping = (on) => document.body.classList.toggle("dropping", on);
  const here = () => document.querySelector("section:not([hidden]) .attach");
  document.addEventListener("dragover", (event) => {
    if (!files(event)) return;
    event.preventDefault(); // a browser would leave the page to show the file
    event.dataTransfer.dropEffect = here() ? "copy" : "none";
    dropping(Boolean(here()));
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && dropping(false));
  document.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    dropping(false);
    attachFiles(event.dataTransfer.files);
  });
}

async function attachFiles(files) {
  const read = await Promise.allSettled([...files].map(async (file) => [file.name, await textOf(file)]));
  take(
    read.filter((one) => one.status === "fulfilled").map((one) => one.value),
    read.filter((one) => one.status === "rejected").map((one) => one.reason.message),
  );
}

async function textOf(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is too large to attach (${bytes(file.size)}).`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    const why = error instanceof TypeError ? "is not text in UTF-8" : "cannot be read; is it a folder?";
    throw new Error(`${file.name} ${why}`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not text`);
  if (text === "") throw new Error(`${file.name} is empty`);
  return text;
}

function take(documents, refused) {
  trouble = refused.map((why) => `Not attached: ${why}${why.endsWith(".") ? "" : "."}`);
  const before = new Set(world.attached.map(({ name }) => name));
  const again = documents.map(([name]) => name).filter((name) => before.has(name));
  if (again.length) trouble.push(`Replaced what had the same name: ${again.join(", ")}.`);
  world.attach(documents);
  if (documents.length) announce(`${count(documents.length, "document")} attached.`);
}

// The fields of one view. `data-own` says whether the view can look up the text's own past.
function fill(root) {
  const id = `attach-${(made += 1)}`;
  const input = el("input", { type: "file", multiple: true, hidden: true });
  input.addEventListener("change", async () => {
    await attachFiles(input.files);
    input.value = ""; // the same file can be chosen again
  });
  const choose = button("Attach files", () => input.click());
  const list = el("ul", { class: "attachments", "aria-label": "Attached documents" });
  const note = el("p", { class: "note", role: "alert", hidden: true });
  const hint = el("p", { class: "quiet", hidden: true });
  const paste = pasting(id);
  const bar = el("div", { class: "bar" }, choose, input, paste.opener);
  if (root.dataset.own !== undefined) bar.append(ownPast());
  root.append(bar, paste.panel, list, hint, note);

  function show() {
    list.replaceChildren(...world.attached.map((one) => item(one, () => choose.focus())));
    list.hidden = !world.attached.length;
    note.hidden = !trouble.length;
    note.replaceChildren(trouble.join(" "));
    const left = world.only.length && !world.only.some((name) => /^(attached:|\*)/.test(name));
    hint.hidden = !(left && world.attached.length);
    hint.textContent = "The filter names other documents; add attached:* to it, and these are looked up too.";
  }
  world.addEventListener("attached", show);
  world.addEventListener("filter", show);
  show();
}

function item({ name, size }, left) {
  const remove = () => {
    trouble = [];
    world.detach(name);
    announce(`${name} is no longer attached.`);
    left();
  };
  return el(
    "li",
    { class: "chip" },
    el("span", { class: "chip-name" }, name),
    el("span", { class: "figure quiet" }, bytes(size)),
    button("×", remove, { class: "chip-off", "aria-label": `Detach ${name}` }),
  );
}

function pasting(id) {
  const name = el("input", { type: "text", maxlength: "1000", autocomplete: "off", placeholder: "pasted text" });
  const text = el("textarea", { rows: "4", spellcheck: "false" });
  const panel = el("div", { class: "paste", id, hidden: true });
  const opener = button("Paste a text", () => open(panel.hidden), { "aria-expanded": "false", "aria-controls": id });
  const open = (on) => {
    panel.hidden = !on;
    opener.setAttribute("aria-expanded", on);
    (on ? text : opener).focus();
  };
  const add = () => {
    if (text.value === "") return text.focus();
    take([[name.value.trim() || freeName(), text.value]], []);
    name.value = text.value = "";
    open(false);
  };
  const keys = (event) => {
    if (event.key === "Escape") open(false);
    else if (event.key !== "Enter" || event.isComposing) return;
    else if (event.target === name || (event.target === text && (event.ctrlKey || event.metaKey))) add();
    else return; // a new line, or a button
    event.preventDefault(); // the view's form is not sent
  };
  panel.addEventListener("keydown", keys);
  panel.append(
    el("label", {}, "Name", name),
    el("label", {}, "Text", text),
    el(
      "div",
      { class: "bar" },
      button("Attach", add),
      button("Cancel", () => open(false)),
    ),
  );
  return { opener, panel };
}

function freeName() {
  const taken = new Set(world.attached.map(({ name }) => name));
  let name = "pasted text";
  for (let number = 2; taken.has(name); number += 1) name = `pasted text ${number}`;
  return name;
}

function ownPast() {
  const box = el("input", { type: "checkbox", on: { change: () => world.lookUpOwnPast(box.checked) } });
  world.addEventListener("attached", () => (box.checked = world.ownPast));
  return el("label", { class: "check" }, box, " Own past: what the text itself said before the model's window");
}
