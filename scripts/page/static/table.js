// Tables that change in place: a row keeps its element, so that a selection, a focus and an open detail stay.

import { byId, el, setHidden, setText } from "./text.js";

// `columns` are {name, cell(row) → text or {text, claimed, title, className, label}, kind: "number", claimed: true, from}.
// `from`, "tablet", "laptop" or "desktop", is the least screen that has room for a column.
// The first is the row's header. `detail(row)` may give a text that is shown on demand in the last column.
export class Table {
  constructor(id, columns, key, shown) {
    const folded = columns.map(({ kind, from, ...rest }) => ({ ...rest, kind: [kind, from].filter(Boolean).join(" ") }));
    Object.assign(this, { columns: folded, key, shown, all: false, rows: new Map(), last: [] });
    const table = byId(id);
    const heads = folded.map(({ name, kind, claimed }) =>
      el("th", { className: kind, attributes: { scope: "col" } }, name, ...(claimed ? [claim()] : [])));
    this.body = el("tbody");
    table.append(el("thead", {}, el("tr", {}, ...heads)), this.body);
    this.more = byId(`${id}-more`);
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.show(this.last);
    });
    this.more.setAttribute("aria-controls", id);
  }

  show(rows) {
    this.last = rows;
    const visible = this.all ? rows : rows.slice(0, this.shown);
    const kept = new Set();
    visible.forEach((row, index) => {
      const key = this.key(row);
      kept.add(key);
      let line = this.rows.get(key);
      if (!line) this.rows.set(key, (line = this.line()));
      this.fill(line, row);
      if (this.body.children[index] !== line) this.body.insertBefore(line, this.body.children[index] ?? null);
    });
    for (const [key, line] of this.rows) {
      if (kept.has(key)) continue;
      line.remove();
      this.rows.delete(key);
    }
    setHidden(this.more, rows.length <= this.shown);
    setText(this.more, this.all ? `Show ${this.shown}` : `Show all ${rows.length}`);
    this.more.setAttribute("aria-expanded", String(this.all));
  }

  line() {
    return el("tr", {}, ...this.columns.map(({ kind }, index) =>
      index ? el("td", { className: kind }) : el("th", { className: kind, attributes: { scope: "row" } })));
  }

  fill(line, row) {
    this.columns.forEach(({ cell, kind }, index) => {
      const given = cell(row);
      const { text, claimed = "", title = "", className = "", label = "" } = typeof given === "string" ? { text: given } : given;
      const node = line.children[index];
      const name = ownName(claimed), whole = text + name.map((each) => each.textContent ?? each).join("");
      if (node.textContent !== whole) node.replaceChildren(el("bdi", {}, text), ...name);
      if (node.title !== title) node.title = title;
      const wanted = `${kind} ${className}`.trim();
      if (node.className !== wanted) node.className = wanted;
      if (label && node.firstChild && node.firstChild.ariaLabel !== label) {
        node.firstChild.setAttribute("role", "img");
        node.firstChild.ariaLabel = label;
      }
    });
  }
}

// A name that a peer gives itself: an element of its own, so that no sign in it is taken for one of the page.
export const ownName = (name) => (name ? [" ", el("bdi", { className: "own" }, name), claim()] : []);

export const claim = () => el("span", { className: "claim", title: "claimed, not verified" }, "~");
