// The page of a run: each part is drawn anew only if what it shows has changed.

import { Chart } from "./chart.js";
import { follow } from "./live.js";
import { People, showVotes, uniqueNames } from "./people.js";
import { Rounds } from "./rounds.js";
import { Samples } from "./samples.js";
import { byId, DASH, duration, el, isNumber, loss, number, percent, plain, plural, setHidden, setText, short } from "./text.js";

// What is copied goes into a shell: a link and nothing else, as `dht/run/link.py` writes it.
const LINK = /^flockstep:\/\/[a-z2-7]{52}\?[\w/:.~+=&-]{1,3900}$/;
const JOIN = "One line: any network, no open port, leave and come back at will. It asks before the first join.";
const CALM = ["starting", "looking", "over"]; // States whose reason tells of no trouble.
const NEWS_MS = 15000; // A screen reader is told of a round at most so often.
const chart = new Chart(), people = new People(), rounds = new Rounds(), samples = new Samples();
let newsAt = 0;

function show(picture, keys) {
  const changed = (...names) => !keys || names.some((name) => keys.includes(name));
  if (changed("name", "model", "params", "by", "contact", "data", "progress", "reason")) showHead(picture);
  if (changed("progress", "members", "rounds", "evaluations")) showTiles(picture);
  if (changed("rounds", "evaluations")) chart.show(picture.rounds, picture.evaluations);
  if (changed("evaluations", "members")) samples.show(picture.evaluations ?? [], uniqueNames(picture.members));
  if (changed("members", "recent", "credit", "rounds")) people.show(picture);
  if (changed("votes", "decides", "members")) showVotes(picture);
  if (changed("rounds", "recent", "troubles", "members")) rounds.show(picture);
  if (changed("link", "joining")) showLink(picture);
  if (changed("run", "owner", "taken_by", "flockstep", "verified", "goes_on")) showFoot(picture);
  if (changed("rounds")) tell(picture);
}

// What the run is, on what data, for how long and for whom, in a sentence.
function about({ model, params, by, contact, data, progress: { rounds = 0 } = {} }) {
  const asked = [by, contact].filter(Boolean).map((text) => plain(text)).join(", ");
  const on = data === "text:{stdlib}" ? "Python's standard library" : data === "own" ? "data of their own" : plain(data);
  const parts = [plain(model), params ? `${short(params)} parameters` : "", on ? `on ${on}` : "", rounds ? `in ${plural(rounds, "round")}` : "", asked ? `asked for by ${asked} ~` : ""];
  return `Volunteers train this model together on computers that they lend: ${parts.filter(Boolean).join(", ") || "it begins soon"}.`;
}

function showHead(picture) {
  const { name, progress = {} } = picture;
  const { round = 0, rounds: planned = 0, state = "", reason = "" } = progress;
  setText(byId("name"), plain(name) || "A run");
  document.title = `${plain(name) || "A run"} – flockstep`;
  setText(byId("what"), about(picture));
  const pill = byId("state");
  setText(pill, plain(state));
  pill.dataset.state = state;
  const said = plain(reason);
  setText(byId("reason"), said.charAt(0).toUpperCase() + said.slice(1));
  byId("reason").className = CALM.includes(state) ? "soft" : state === "waiting" ? "notice" : "fault";
  setHidden(byId("reason"), !reason);
  const done = planned ? Math.min(1, round / planned) : 0;
  byId("progress").value = done;
  const parts = [planned ? `round ${number(round)} of ${number(planned)}` : `round ${number(round)}`];
  if (planned) parts.push(percent(done));
  if (isNumber(progress.seconds_left) && state === "training") parts.push(`${duration(progress.seconds_left)} left`);
  setText(byId("progress-text"), parts.join(", "));
}

function showTiles({ progress = {}, members = [], votes, rounds: columns = {}, evaluations = [] }) {
  const { round = [], loss: stated = [] } = columns, first = stated.findIndex(isNumber), last = stated.findLast(isNumber);
  const { loss: held, by = [] } = evaluations.at(-1) ?? {};
  const here = members.filter((member) => member.here !== false);
  const training = here.filter((member) => member.state === "training").length;
  const tiles = [
    isNumber(held) ? ["held-out loss ~", loss(held), `stated by ${number(by.length)}; training ${loss(last)} ~`] : ["training loss ~", loss(last), first < 0 ? "" : `${loss(stated[first])} in round ${number(round[first])}`],
    ["tokens", short(progress.tokens), isNumber(progress.tokens_per_s) ? `${short(progress.tokens_per_s)} a second${progress.claimed ? " ~" : ""}` : ""],
    ["here", number(here.length), training ? `${number(training)} train` : ""],
    ["a round takes", duration(progress.round_seconds), isNumber(progress.seconds_left) && progress.state === "training" ? `${duration(progress.seconds_left)} left` : ""],
  ];
  const box = byId("tiles");
  if (!box.children.length) {
    box.append(...tiles.map(() => el("div", {}, el("dt"), el("dd"), el("dd", { className: "of" }))));
  }
  tiles.forEach((texts, index) => texts.forEach((text, part) => setText(box.children[index].children[part], text)));
}

// The link names the newest certificate; a line that somebody is about to copy stays as it is.
function showLink({ link, joining }) {
  const line = byId("join-line");
  const selected = getSelection().type === "Range" && getSelection().containsNode(line, true);
  const whole = LINK.test(link ?? "");
  const command = joining ? link : `flockstep join '${link}'`;
  if (!selected) setText(line, whole ? command : "The link of this run is not known yet.");
  setText(byId("join-how"), plain(joining) || JOIN);
  byId("copy").disabled = !whole;
}

function showFoot({ run, owner, taken_by: by, flockstep, verified, goes_on: goesOn }) {
  setText(byId("run"), plain(run) || DASH);
  setText(byId("owner"), plain(owner) || DASH);
  setText(byId("taken-by"), plain(by) || DASH);
  setText(byId("version"), plain(flockstep));
  setText(byId("goes-on"), goesOn ? `It ${plain(goesOn)}.` : "");
  setText(byId("verified"), verified ? `Verified here: ${plain(verified)}.` : "");
}

function tell({ rounds: columns = {} }) {
  const last = columns.round?.at(-1);
  if (last === undefined || performance.now() - newsAt < NEWS_MS) return;
  newsAt = performance.now();
  setText(byId("news"), `Round ${number(last)}: loss ${loss(columns.loss.at(-1))}`);
}

async function copy() {
  const line = byId("join-line");
  try {
    await navigator.clipboard.writeText(line.textContent);
    setText(byId("copied"), "Copied: paste it into a terminal.");
  } catch {
    // Over plain HTTP from elsewhere a browser gives no clipboard: the line is selected instead.
    getSelection().selectAllChildren(line);
    setText(byId("copied"), "Selected: press Ctrl+C to copy it.");
  }
}

byId("copy").addEventListener("click", copy);
byId("audits").addEventListener("change", ({ target }) => document.body.classList.toggle("audits", target.checked));
follow(show, byId("live"));
