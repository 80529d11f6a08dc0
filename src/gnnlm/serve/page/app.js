// The page: views, colours, the key, and what happens when the server is not there.

import { whenKeyIsNeeded } from "./api.js";
import { startAbout } from "./about.js";
import { startAttach } from "./attach.js";
import { startDocuments } from "./documents.js";
import { button, byId, el, onSubmit } from "./dom.js";
import { startFilter } from "./filter.js";
import { startGraph } from "./graph.js";
import { startScore } from "./score.js";
import { startWrite } from "./write.js";
import { world } from "./world.js";

const VIEWS = ["write", "score", "graph", "documents", "about"];

// -- views ------------------------------------------------------------------------------------------------------

function showView() {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return; // the link that skips to the text
  const view = VIEWS.includes(wanted) ? wanted : "write";
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.body.dataset.view = view;
  document.title = `${view[0].toUpperCase()}${view.slice(1)} · gnnlm`;
}

function goTo(view) {
  location.hash = view;
  showView();
  scrollTo(0, 0);
}

// -- colours ----------------------------------------------------------------------------------------------------

function startColours() {
  const select = byId("theme");
  const apply = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };
  select.value = localStorage.getItem("gnnlm-theme") ?? "auto";
  apply(select.value);
  select.addEventListener("change", () => {
    localStorage.setItem("gnnlm-theme", select.value);
    apply(select.value);
  });
}

// -- the key ----------------------------------------------------------------------------------------------------

function askKey(message) {
  const dialog = byId("key");
  byId("key-trouble").textContent = message;
  byId("key-value").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let given = null;
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      given = byId("key-value").value.trim();
      byId("key-value").value = "";
      dialog.close();
    };
    byId("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(given || null);
  });
}

// -- starting ---------------------------------------------------------------------------------------------------

function offerRuns() {
  const select = byId("run");
  byId("run-choice").hidden = world.runs.length < 2;
  select.replaceChildren(...world.runs.map((name) => el("option", { value: name }, name)));
  select.addEventListener("change", () => world.choose(select.value));
}

// A run without a graph network has no graph to show.
function offerGraph() {
  const without = !world.predictors.includes("gnn");
  document.querySelector('nav a[href="#graph"]').hidden = without;
  if (without && location.hash === "#graph") goTo("write");
}

async function start() {
  const trouble = byId("trouble");
  try {
    await world.load();
  } catch (error) {
    trouble.replaceChildren(el("p", {}, error.message), button("Try again", start));
    trouble.hidden = false;
    return;
  }
  trouble.hidden = true;
  offerRuns();
  startFilter();
  startAttach();
  const openDocument = startDocuments();
  const showGraph = startGraph({
    openDocument: (name, place) => {
      goTo("documents");
      openDocument(name, place);
    },
  });
  startWrite({
    showGraph: (...given) => {
      goTo("graph");
      showGraph(...given);
    },
  });
  startScore();
  startAbout();
  offerGraph();
  world.addEventListener("run", offerGraph);
  document.documentElement.dataset.ready = "";
}

whenKeyIsNeeded(askKey);
startColours();
addEventListener("hashchange", showView);
for (const id of ["write-form", "score-form", "graph-form", "documents-form"]) onSubmit(byId(id), () => {}); // never leave the page
showView();
start();
