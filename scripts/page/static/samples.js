// What the model writes after each evaluation; a slider moves along them, and stays at the newest while it is there.

import { byId, el, loss, number, plain, plainLines, setHidden, setText, tail } from "./text.js";

export class Samples {
  constructor() {
    this.evaluations = [];
    this.slider = byId("scrub");
    this.slider.addEventListener("input", () => this.draw());
  }

  show(evaluations, names) {
    this.names = names;
    const atEnd = Number(this.slider.value) >= this.evaluations.length - 1;
    this.evaluations = evaluations.filter((each) => each.samples?.length);
    setHidden(byId("samples"), !this.evaluations.length);
    if (!this.evaluations.length) return;
    const several = this.evaluations.length > 1;
    setText(byId("samples-how"), several ? "The same beginning after each evaluation: move along the rounds." : "After the first evaluation.");
    setText(byId("samples-since"), several ? since(this.evaluations) : "");
    setHidden(this.slider, !several);
    this.slider.max = this.evaluations.length - 1;
    if (atEnd) this.slider.value = this.slider.max;
    this.draw();
  }

  draw() {
    const { round, loss: held, samples, by = [] } = this.evaluations[Number(this.slider.value)];
    const text = `after round ${number(round)}, held-out loss ~ ${loss(held)}; ${author(by, this.names)}`;
    setText(byId("scrub-text"), text);
    this.slider.setAttribute("aria-valuetext", text);
    byId("sample").replaceChildren(...samples.slice(0, 8).map(({ prompt, text: written }) =>
      el("p", {}, el("mark", { title: plain(prompt) }, plainLines(prompt)), plainLines(written))));
  }
}

// A member's newest evaluation takes the place of the one before, so whoever comes late sees the last ones only.
function since(evaluations) {
  const rounds = evaluations.map((each) => each.round);
  const gaps = rounds.slice(1).map((round, place) => round - rounds[place]);
  return rounds[0] > Math.min(...gaps) ? ` Seen here since round ${number(rounds[0])}.` : "";
}

// Of several members those texts are shown that two state (collectives/evaluation/result.py); that of one is its word alone.
function author(by, names) {
  return by.length === 1 ? `as ${names.get(by[0]) ?? tail(by[0])} alone states it ~` : "two members state this text ~";
}
