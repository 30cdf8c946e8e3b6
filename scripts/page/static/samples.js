// What the model writes after each evaluation; a slider moves along them, and stays at the newest while it is there.

import { byId, el, loss, number, plain, plainLines, setHidden, setText } from "./text.js";

export class Samples {
  constructor() {
    this.evaluations = [];
    this.slider = byId("scrub");
    this.slider.addEventListener("input", () => this.draw());
  }

  show(evaluations) {
    const atEnd = Number(this.slider.value) >= this.evaluations.length - 1;
    this.evaluations = evaluations.filter((each) => each.samples?.length);
    setHidden(byId("samples"), !this.evaluations.length);
    if (!this.evaluations.length) return;
    this.slider.max = this.evaluations.length - 1;
    if (atEnd) this.slider.value = this.slider.max;
    this.draw();
  }

  draw() {
    const { round, loss: held, samples } = this.evaluations[Number(this.slider.value)];
    const text = `after round ${number(round)}, held-out loss ${loss(held)}`;
    setText(byId("scrub-text"), text);
    this.slider.setAttribute("aria-valuetext", text);
    byId("sample").replaceChildren(...samples.slice(0, 8).map(({ prompt, text: written }) =>
      el("p", {}, el("mark", { title: plain(prompt) }, plainLines(prompt)), plainLines(written))));
  }
}
