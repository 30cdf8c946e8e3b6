// The rounds, who took part in each and why not, and what went wrong.

import { peerCell, uniqueNames } from "./people.js";
import { Table } from "./table.js";
import { byId, clock, DASH, isNumber, loss, number, plain, plural, setHidden, setText, tail } from "./text.js";

const VOTED = "it voted, and sent no work"; // Of VOTED in collectives/picture/fold.py: nothing is missing there.
const KINDS = {
  flag: "not counted", void: "void", fork: "fork", liar: "false answer",
  stall: "stall", ban: "banned", pardon: "pardoned", revoke: "vote revoked",
};

export class Rounds {
  constructor() {
    this.columns = {};
    this.rows = new Map();
    this.names = new Map();
    const kind = "number";
    this.rounds = new Table("rounds", [
      { name: "round", kind, cell: (r) => number(r.round) },
      { name: "time", kind, from: "tablet time", cell: (r) => clock(this.of(r, "time")) },
      { name: "loss", kind, claimed: true, cell: (r) => loss(this.of(r, "loss")) },
      { name: "took part", kind, cell: (r) => `${r.cut.length} of ${r.roster.length - keeping(r).length}` },
      { name: "left out, and why", cell: (r) => ({ text: absences(r, this.names), className: "why" }) },
      { name: "signed", from: "laptop audit", kind, cell: (r) => signed(r) },
      { name: "state", from: "laptop audit", cell: (r) => ({ text: plain(r.root).slice(0, 8), title: plain(r.root), className: "hex" }) },
      { name: "certificate", from: "desktop audit", cell: (r) => ({ text: plain(r.hash).slice(0, 8), title: plain(r.hash), className: "hex" }) },
    ], (r) => r.hash, 12);
    this.troubles = new Table("troubles", [
      { name: "round", kind, cell: (t) => (t.round ? number(t.round) : DASH) },
      { name: "time", kind, from: "tablet time", cell: (t) => clock(t.time) },
      { name: "what", cell: (t) => ({ text: plain(KINDS[t.kind] ?? t.kind), className: "wrap" }) },
      { name: "peer", cell: (t) => (t.peer ? peerCell(t.peer, "", this.names) : DASH) },
      { name: "why", cell: (t) => ({ text: plain(t.reason), className: "why" }) },
    ], (t) => `${t.round} ${t.kind} ${t.peer} ${t.reason}`, 8);
  }

  of(round, name) {
    return this.columns[name]?.[this.rows.get(round.round)];
  }

  show({ rounds = {}, recent = [], troubles = [], members = [] }) {
    this.names = uniqueNames(members);
    this.columns = rounds;
    const numbers = rounds.round ?? [], from = Math.max(0, numbers.length - recent.length);
    this.rows = new Map(numbers.slice(from).map((number, index) => [number, from + index]));
    byId("rounds").classList.toggle("timeless", !recent.some((row) => isNumber(this.of(row, "time"))));
    byId("troubles").classList.toggle("timeless", !troubles.some(({ time }) => isNumber(time)));
    this.rounds.show(recent);
    this.troubles.show(troubles);
    setHidden(byId("rounds-box"), !recent.length);
    setHidden(byId("troubles-box"), !troubles.length);
    setText(byId("troubles-text"), troubles.length ? `${plural(troubles.length, "entry", "entries")}, the newest first.` : "Nothing so far.");
  }
}

const keeping = (round) => (round.out ?? []).filter(({ reason }) => reason === VOTED);

function signed(round) {
  const count = plural(round.voters.length, "voter");
  return round.quorum ? `${count}, ${number(round.quorum)} of ${number(round.total)} votes needed` : count;
}

// Who was left out, by reason: "came too late: a1b2c3d4, e5f6a7b8; was not here: …".
function absences(round, names) {
  const byReason = new Map();
  for (const { peer, reason } of round.out ?? []) {
    if (reason === VOTED) continue;
    byReason.set(reason, [...(byReason.get(reason) ?? []), names.get(peer) ?? tail(peer)]);
  }
  const parts = [...byReason].map(([reason, peers]) => `${plain(reason)}: ${peers.slice(0, 6).join(", ")}` + (peers.length > 6 ? ` and ${peers.length - 6} more` : ""));
  return parts.join("; ") || DASH;
}
