// The list of the runs that a bootstrap serves; each leads to its page.

import { follow } from "./live.js";
import { byId, el, number, plain, plural, setText } from "./text.js";

function show({ runs = [] }) {
  setText(byId("runs-text"), runs.length ? plural(runs.length, "run") : "No run is served at the moment.");
  byId("runs").replaceChildren(...runs.map(({ run, name, model, round, rounds, state }) =>
    el("li", { className: "card" },
      el("a", { href: `${encodeURIComponent(run)}/` }, el("bdi", {}, plain(name) || plain(run).slice(0, 12))),
      el("span", { className: "soft" }, plain(model)),
      el("span", { className: "soft" }, [plain(state), round ? `round ${number(round)}${rounds ? ` of ${number(rounds)}` : ""}` : ""].filter(Boolean).join(", ")))));
}

follow(show, byId("live"));
