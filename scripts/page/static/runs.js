// The list of the runs that a bootstrap serves; each leads to its page.

import { follow } from "./live.js";
import { byId, el, number, percent, plain, plural, setText, short } from "./text.js";

function show({ runs = [] }) {
  setText(byId("runs-text"), runs.length ? plural(runs.length, "run") : "No run is served at the moment.");
  byId("runs").replaceChildren(...runs.map(({ run, name, model, params, round, rounds, state }) =>
    el("li", { className: "card" },
      el("h2", {}, el("a", { href: `${encodeURIComponent(run)}/` }, el("bdi", {}, plain(name) || plain(run).slice(0, 12)))),
      el("p", { className: "soft" }, [plain(model), params ? `${short(params)} parameters` : ""].filter(Boolean).join(", ")),
      pill(state),
      ...(rounds ? progress(round ?? 0, rounds, plain(name)) : []))));
}

function pill(state) {
  const node = el("p", { className: "pill" }, plain(state));
  node.dataset.state = state;
  return node;
}

function progress(round, rounds, name) {
  const done = Math.min(1, round / rounds);
  const bar = el("progress", { max: 1, value: done, ariaLabel: `Rounds of ${name} that are done` });
  return [el("div", { className: "progress" }, bar, el("span", {}, `round ${number(round)} of ${number(rounds)}, ${percent(done)}`))];
}

follow(show, byId("live"));
