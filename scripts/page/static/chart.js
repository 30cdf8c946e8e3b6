// The curve: the loss that members state, and the evaluations, over rounds, tokens or time. Drawn by uPlot.

import { byId, clock, isNumber, loss, number, setText, short } from "./text.js";

const HEIGHT = 320, HEIGHT_PHONE = 240, PHONE = 600;
// Between two ticks of rounds or tokens, of which there are whole ones only.
const WHOLE_STEPS = [...Array(16).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
const AXES = { round: "round", tokens: "tokens", time: "time" };

export class Chart {
  constructor() {
    this.box = byId("chart");
    this.text = byId("chart-text");
    this.axis = "round";
    this.data = [[], [], []];
    this.rows = [];
    this.index = null;
    this.plot = null;
    this.evaluated = false;
    for (const input of document.querySelectorAll("input[name=axis]")) {
      input.addEventListener("change", () => {
        this.axis = input.value;
        this.index = null;
        this.draw();
      });
      if (input.checked) this.axis = input.value; // A browser keeps the choice over a reload.
    }
    this.box.addEventListener("keydown", (event) => this.key(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.box);
  }

  show(rounds, evaluations) {
    this.rounds = rounds;
    this.evaluations = evaluations;
    const evaluated = this.evaluated;
    if (this.collect() && this.plot && evaluated === this.evaluated) {
      this.plot.setData(this.drawn());
      this.showLast(this.plot);
      this.describe();
    } else {
      this.draw();
    }
  }

  // Fills `data` (x, loss, evaluated loss); returns false where nothing can be drawn.
  collect() {
    const { rounds = {}, evaluations = [] } = this;
    const evaluated = new Map(evaluations.map((each) => [each.round, each.loss]));
    const numbers = rounds.round ?? [], xs = rounds[this.axis] ?? [];
    this.data = [[], [], []];
    this.rows = [];
    let last = -Infinity;
    numbers.forEach((round, index) => {
      const x = xs[index];
      if (!isNumber(x) || x < last) return; // The time of a round that was over before it was seen is not known.
      last = x;
      this.data[0].push(x);
      this.data[1].push(isNumber(rounds.loss[index]) ? rounds.loss[index] : null);
      this.data[2].push(isNumber(evaluated.get(round)) ? evaluated.get(round) : null);
      this.rows.push(index);
    });
    this.evaluated = this.data[2].some(isNumber);
    return this.data[0].length > 0;
  }

  drawn() {
    return this.evaluated ? this.data : this.data.slice(0, 2);
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    if (this.collect()) this.showLast((this.plot = new uPlot(this.options(), this.drawn(), this.box)));
    this.describe();
  }

  size() {
    const width = this.box.clientWidth;
    return { width, height: width < PHONE ? HEIGHT_PHONE : HEIGHT };
  }

  options() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const axis = { stroke: colour("soft"), grid: { stroke: colour("rule"), width: 1 }, ticks: { stroke: colour("rule"), width: 1 } };
    const x = this.axis === "time" ? {} : { incrs: WHOLE_STEPS, values: (_plot, ticks) => ticks.map((tick) => (this.axis === "tokens" ? short(tick) : number(tick))) };
    const series = { value: (_plot, value) => loss(value), spanGaps: true };
    const held = { ...series, label: "held out ~", stroke: colour("s2"), width: 0, paths: () => null, points: { show: true, size: 9, fill: colour("card"), width: 2.4 } };
    const few = this.data[0].length < 60;
    return {
      ...this.size(),
      scales: { x: { time: this.axis === "time" }, y: { range: (_plot, low, high) => padded(low, high) } },
      axes: [{ ...axis, ...x }, { ...axis, size: (_plot, labels) => 20 + 8 * Math.max(3, ...(labels ?? []).map((label) => label.length)), values: (_plot, ticks) => ticks.map((tick) => tick.toFixed(digits(ticks))) }],
      series: [
        { label: AXES[this.axis], value: (_plot, value) => this.label(value) },
        { ...series, label: "training ~", stroke: colour("s1"), width: 2, points: { show: few, size: 5 } },
        ...(this.evaluated ? [held] : []),
      ],
      cursor: { drag: { x: true, y: false }, y: false },
      legend: { live: true },
      hooks: { setCursor: [(plot) => this.showLast(plot)] },
    };
  }

  // Without a cursor the legend shows the last point, in place of a row of dashes.
  showLast(plot) {
    if (isNumber(plot.cursor.idx)) return;
    const lasts = this.drawn().map((values) => values.findLastIndex(isNumber));
    plot.setLegend({ idxs: lasts }, false);
  }

  label(value) {
    if (!isNumber(value)) return "–";
    return this.axis === "time" ? clock(value) : this.axis === "tokens" ? short(value) : number(value);
  }

  // Arrow keys, Home and End move the cursor; the slider's text is what a screen reader says.
  key(event) {
    const last = this.data[0].length - 1, page = Math.max(1, Math.round(last / 20));
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -page, PageUp: page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.index = Math.min(last, Math.max(0, (this.index ?? last) + moves[event.key]));
    const y = this.data[1][this.index] ?? this.data[2][this.index];
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][this.index], "x"), top: isNumber(y) ? this.plot.valToPos(y, "y") : 0 });
    this.box.setAttribute("aria-valuenow", String(this.index));
    this.box.setAttribute("aria-valuetext", this.point(this.index));
  }

  point(index) {
    const row = this.rows[index], { round, tokens } = this.rounds;
    const held = this.data[2][index];
    return `round ${number(round[row])}, ${short(tokens[row])} tokens: loss ${loss(this.data[1][index])}` + (isNumber(held) ? `, held out ${loss(held)}` : "");
  }

  describe() {
    const [xs, losses, held] = this.data, last = xs.length - 1;
    const first = losses.findIndex(isNumber), end = losses.findLastIndex(isNumber);
    const since = first > 0 ? ` in round ${number(this.rounds.round[this.rows[first]])}` : "";
    const training = first < 0 ? "no loss is known" : `training loss from ${loss(losses[first])}${since} to ${loss(losses[end])} (the median of what members state)`;
    const best = held.findLastIndex(isNumber);
    const text = last < 0 ? "The curve begins with the first round." : `${number(xs.length)} rounds: ${training}` + (best < 0 ? "." : `; held-out loss ${loss(held[best])} after the last evaluation.`);
    setText(this.text, text);
    this.box.setAttribute("aria-valuemax", String(Math.max(0, last)));
    if (this.index === null) {
      this.box.setAttribute("aria-valuenow", String(Math.max(0, last)));
      this.box.setAttribute("aria-valuetext", last < 0 ? "no round yet" : this.point(last));
    }
  }
}

// As many as the distance of the ticks has: 0.5 → 1, 0.25 → 2.
function digits([first, second]) {
  const step = second - first;
  return [0, 1, 2].find((count) => Math.abs(step * 10 ** count - Math.round(step * 10 ** count)) < 1e-6) ?? 3;
}

function padded(low, high) {
  if (!isNumber(low) || !isNumber(high)) return [0, 1];
  const pad = Math.max(0.02, 0.08 * (high - low));
  return [low - pad, high + pad];
}
