"use strict";
// Tables sort by a click on a column's heading: ascending, descending, then as they were.
// Without this script the page is whole; headings are then plain text.
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const original = [...body.rows];
  const headings = [...table.tHead.rows[0].cells];
  const status = document.getElementById("status");

  const value = (cell) => {
    if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
    const text = cell.textContent.trim();
    if (text === "" || text === "-") return null; // not known: always last
    const number = /^[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?/i.exec(text);
    return text === "inf" ? Infinity : number ? Number(number[0].replaceAll(",", "")) : text;
  };
  const compare = (a, b) => {
    if (typeof a === "number" && typeof b === "number") return a === b ? 0 : a < b ? -1 : 1;
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return a.localeCompare(b, "en", { numeric: true });
  };
  const sort = (column, order) => {
    const keyed = original.map((row) => ({ row, key: value(row.cells[column]) }));
    const known = keyed.filter(({ key }) => key !== null);
    if (order) known.sort((a, b) => order * compare(a.key, b.key)); // stable: equal rows stay as they were
    const rows = order ? [...known, ...keyed.filter(({ key }) => key === null)] : keyed;
    body.append(...rows.map(({ row }) => row));
  };

  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.firstElementChild.childNodes);
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      const next = { none: "ascending", ascending: "descending", descending: "none" }[heading.getAttribute("aria-sort")];
      for (const other of headings) other.setAttribute("aria-sort", "none");
      heading.setAttribute("aria-sort", next);
      sort(column, { none: 0, ascending: 1, descending: -1 }[next]);
      status.textContent = next === "none" ? "as it was" : `sorted by ${button.textContent}, ${next}`;
    });
  });
}
