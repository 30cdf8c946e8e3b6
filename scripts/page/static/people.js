// Who is here, who decides, and who has given what.

import { ownName, Table } from "./table.js";
import { byId, bytes, DASH, el, loss, number, plain, plural, setHidden, setText, short, tail } from "./text.js";

const STRIP = 24; // The last rounds of a member, in one cell.
const SIGNS = ["●", "◆", "○"]; // Its work is in the result; it voted only; it was there and its work is not.
const FULL_TRUST = 0.999;
const WORDS = { training: "trains", keeping: "keeps", finished: "has finished", joining: "is joining" };

const state = (member) => (member.here === false ? "is missing" : plain(WORDS[member.state] ?? member.state));

const VOTE = "◆ ", NO_VOTE = "  ";

// The names that members give themselves and no other member does, by id.
export function uniqueNames(members = []) {
  const count = new Map();
  for (const { name } of members) count.set(name, (count.get(name) ?? 0) + 1);
  return new Map(members.filter(({ name }) => name && count.get(name) === 1).map(({ peer, name }) => [peer, plain(name)]));
}

// The mark of a vote, and apart from it the name that a peer gives itself, if nobody else has it. Else the end of its id, which
// nobody can choose freely, with the name.
export function peerCell(peer, name, names = new Map(), mark = "") {
  const text = names.has(peer) ? mark : `${mark}${tail(peer)}`;
  return { text, claimed: names.get(peer) ?? plain(name), title: plain(peer), className: "peer" };
}

function strips(recent) {
  const rounds = recent.slice(0, STRIP).reverse().map((round) => [round.cut, round.voters, round.roster].map((each) => new Set(each)));
  return (peer) => rounds.map((sets) => SIGNS[sets.findIndex((set) => set.has(peer))] ?? "·").join("");
}

export class People {
  constructor() {
    this.strip = () => "";
    this.names = new Map();
    const claimed = true, kind = "number";
    this.members = new Table("people", [
      { name: "peer", cell: (m) => peerCell(m.peer, m.name, this.names, m.votes ? VOTE : NO_VOTE) },
      { name: `last ${STRIP} rounds`, from: "laptop", cell: (m) => this.participation(m.peer) },
      { name: "does", claimed, cell: state },
      { name: "device", claimed, from: "laptop", cell: (m) => ({ text: plain(m.device) || DASH, title: plain(m.device), className: "clip" }) },
      { name: "round", claimed, kind, from: "tablet", cell: (m) => number(m.round) },
      { name: "tokens/s", claimed, kind, from: "tablet", cell: (m) => (m.tokens_per_s ? short(m.tokens_per_s) : DASH) },
      { name: "loss", claimed, kind, cell: (m) => loss(m.loss) },
      { name: "path", claimed, from: "desktop audit", cell: (m) => plain(m.rung) || DASH },
      { name: "sent", claimed, kind, from: "desktop audit", cell: (m) => bytes(m.sent) },
      { name: "received", claimed, kind, from: "desktop audit", cell: (m) => bytes(m.received) },
      { name: "trust", kind, from: "laptop audit", cell: (m) => trust(m.trust) },
    ], (m) => m.peer, 16);
    this.credit = new Table("credit", [
      { name: "peer", cell: (c) => peerCell(c.peer, c.name, this.names) },
      { name: "tokens", kind, cell: (c) => number(c.tokens) },
      { name: "rounds", kind, cell: (c) => number(c.rounds) },
    ], (c) => c.peer, 10);
  }

  participation(peer) {
    const text = this.strip(peer);
    return { text, className: "strip", label: `work in ${[...text].filter((sign) => sign === SIGNS[0]).length} of ${text.length} rounds` };
  }

  show({ members = [], recent = [], credit = [], rounds = {} }) {
    this.strip = strips(recent);
    this.names = uniqueNames(members);
    this.members.show([...members].sort((a, b) => (b.credit - a.credit) || (a.peer < b.peer ? -1 : 1)));
    const voters = members.filter((member) => member.votes).length;
    const missing = members.filter((member) => member.here === false).length;
    setText(byId("people-text"), members.length
      ? `${plural(members.length, "member")}, of which ${voters} with a vote (◆)${missing ? ` and ${missing} that ${missing === 1 ? "does" : "do"} not answer` : ""}. In a round: ● its work is in the result, ◆ it voted only, ○ it was there and its work is not, · it was not there.`
      : "Nobody is here at the moment.");
    const first = rounds.round?.[0] ?? 1;
    setText(byId("credit-text"), `The tokens that certificates count${first > 1 ? `, from round ${number(first)} on` : ""}.`);
    this.credit.show(credit);
    setHidden(byId("credit-section"), !credit.length);
  }
}

function trust(value) {
  if (typeof value !== "number") return DASH;
  return value >= FULL_TRUST ? "full" : value.toFixed(2);
}

export function showVotes({ votes, decides, members = [] }) {
  setText(byId("decides"), plain(decides));
  const list = byId("votes");
  setHidden(list, !votes);
  setText(byId("votes-text"), votes ? sentence(votes) : "");
  if (!votes) return;
  const names = new Map(members.map((member) => [member.peer, member.name])), unique = uniqueNames(members);
  const here = new Set(votes.here);
  const items = Object.entries(votes.voters).map(([peer, count]) => {
    const { text, title, claimed } = peerCell(peer, names.get(peer), unique);
    const there = here.has(peer);
    return el("li", { title, className: there ? "here" : "missing" },
      el("bdi", {}, text), ...ownName(claimed), ` ${plural(count, "vote")}, ${there ? "here" : "missing"}`);
  });
  list.replaceChildren(...items);
}

function sentence(votes) {
  const enough = votes.votes >= votes.quorum;
  const decide = `${number(votes.quorum)} ${votes.quorum === 1 ? "decides" : "decide"}`;
  return `${number(votes.votes)} of ${number(votes.total)} votes are here, and ${decide}${enough ? "." : ": rounds wait until enough of them are back."}`;
}
