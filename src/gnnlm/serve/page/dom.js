// Elements made of text. Nothing in this page parses markup: documents and model output are text, always.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, options, children) {
  for (const [name, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("aria-"))
      node.setAttribute(name, String(value)); // "false" says something here
    else if (value === false) continue;
    else if (name === "on") for (const [event, act] of Object.entries(value)) node.addEventListener(event, act);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return node;
}

// el("p", { class: "quiet", on: { click } }, "text", otherElement)
export const el = (tag, options = {}, ...children) => fill(document.createElement(tag), options, children);
export const svg = (tag, options = {}, ...children) => fill(document.createElementNS(SVG, tag), options, children);
export const button = (text, act, options = {}) =>
  el("button", { type: "button", class: "plain", ...options, on: { click: act } }, text);
export const byId = (id) => document.getElementById(id);

// Says something once to those who listen instead of looking.
export function announce(text) {
  byId("status").textContent = text;
}

// A set of radio buttons that looks like one control; returns nothing, calls `chosen` with the value.
export function segments(fieldset, name, choices, value, chosen) {
  const legend = fieldset.querySelector("legend");
  const made = choices.map(([key, label]) => {
    const input = el("input", { type: "radio", name, value: key, on: { change: () => chosen(key) } });
    input.checked = key === value;
    return el("label", {}, input, el("span", {}, label));
  });
  fieldset.replaceChildren(legend, ...made);
}

// What a form's submit does instead of leaving the page.
export function onSubmit(form, act) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act();
  });
}

// Ctrl+Enter (or Cmd+Enter) in a text field sends its form.
export function sendWithKeys(textarea) {
  textarea.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      textarea.form.requestSubmit();
    }
  });
}
