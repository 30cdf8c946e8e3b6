"""The table of events: every event name, its fields with their units, and what it means. Pure.

One row here, one `emit`: whatever is in an event log stands in this table, and whatever reads a log (`join`, `status`,
`demo`, `simulate`, the benches) matches on names and fields of this table. Names and fields never change their meaning:
they are in recorded traces. `python -m flockstep.peer.log.events` prints them as a page; the web site of the docs has it.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

FIELDS = {
    "peer": "id of the other peer",
    "step": "what was being done",
    "reason": "why",
    "remedy": "what a person can do about it",
    "round": "number of the round",
    "rounds": "number of all rounds of the run",
    "attempt": "number of the attempt at that round, from 0",
    "roster": "ids of the members of the round, the proposer first",
    "root": "state root, hex",
    "tokens": "tokens that the run has trained on",
    "loss": "training loss, nats per token; none where the loop does not tell it, or it is not finite",
    "seconds": "how long it took, s",
    "sent": "bytes sent on all sockets",
    "received": "bytes received on all sockets",
    "device": "where this peer trains: cpu, cuda, mps",
    "version": "version of flockstep",
    "peers": "number of members",
    "name": "name of the data source",
    "units": "number of units of the data source",
    "unit": "number of the unit of data",
    "epoch": "number of the epoch",
    "tokens_per_s": "tokens/s of this peer",
    "micro_batch": "samples that pass through the model at once",
}
"""Each common field, what it says and in which unit. An event may say something more exact under the same name."""


class Fault(StrEnum):
    """What an event accuses its peer of, in the terms of fault tolerance."""

    NONE = ""
    OMISSION = "omission"
    """It did not do what it should have; a slow line looks the same."""
    COMMISSION = "commission"
    """It did what no honest peer does."""


@dataclass(frozen=True, slots=True)
class EventKind:
    """One row of the table."""

    name: str
    meaning: str
    fields: Mapping[str, str]
    """Every field that such an event may have beside `time` and `event`, with its meaning and unit."""
    fault: Fault = Fault.NONE


def _row(name: str, meaning: str, common: str = "", /, *, fault: Fault = Fault.NONE, **own: str) -> EventKind:
    """A row from the names of its common fields and the meanings of its own."""
    fields = {field: FIELDS[field] for field in common.split()} | own
    return EventKind(name, meaning, MappingProxyType(fields), fault)


_ATTEMPT = "peer step reason round attempt"
_ROUTER_PORT = "TCP port of the router"
_ENDED = "reason round attempt roster seconds sent received"

GROUPS: Mapping[str, tuple[EventKind, ...]] = {
    "The peer and its run": (
        _row("peer.start", "The peer has started.", "device version", peer="id of this peer"),
        _row("run.joined", "The peer is a member of the run.", "round rounds peers", run="run id"),
        _row("run.agreed", "The run was shown before the first join of it, or its user has agreed before.", "step reason"),
        _row("layout.unpinned", "The run's manifest does not pin what it trains: its first members decide.", "step reason"),
        _row("run.finished", "All rounds of the run are done.", "round root"),
        _row("run.votes", "A keeper reports who is here, once a minute and after each round.", "round peers reason",
             votes="votes of the voters that are here", quorum="votes that decide", total="votes of all voters"),
        _row("peer.leave", "The peer leaves the run.", "reason"),
        _row("peer.paused", "The peer may not train now: its user, the hours or other programs; it has left, and waits.",
             "step reason"),
        _row("peer.resumed", "The peer may train again.", "step reason"),
        _row("peer.stays", "It leaves after one more round, whose voters may need it.", "reason round"),
        _row("peer.left_round", "It leaves a round whose cut it has acknowledged, which its deputies end.", "reason round"),
        _row("peer.leave_failed", "The goodbye to the others was not sent.", "step reason"),
        _row("run.forgotten", "What the disk keeps of the run cannot be read; it is fetched anew.", "step reason"),
        _row("run.not_remembered", "The manifest, the members or the owner's statements were not written to the disk.",
             "step reason"),
        _row("owner.stated", "A statement of the run's owner is in force.", "reason",
             peer="id of the peer that it is about", step="vouch, revoke, ban, pardon, revise or succeed"),
        _row("run.revised", "The settings of the run are others from this round on, since its owner has revised them.",
             "step reason round rounds"),
        _row("run.ended", "The owner has ended the run: this peer's state is on its disk, and stays as it is.",
             "reason round root"),
        _row("run.succeeded", "The peer leaves a run that goes on as another one, to follow it.", "reason round",
             run="id of the run that goes on"),
        _row("run.led", "A link leads to another run, as which its own goes on.", "reason round",
             run="id of the run that goes on"),
        _row("succession.refused", "The owner names a run to go on as that this peer does not follow.", "step reason round",
             run="id of that run"),
        _row("succession.late", "The run goes on from an earlier round than this peer's state.", "step reason round",
             run="id of the run that goes on"),
        _row("succession.retry", "The run that goes on could not be reached; another attempt follows.", "step reason"),
        _row("state.handed_over", "The state of the run before is that of the run that goes on.", "step round root"),
        _row("state.not_handed_over", "What the disk holds of the run before was not taken over; others have it.",
             "step reason round"),
        _row("owner.unheard", "The owner's statements could not be fetched from a member.", "peer step reason"),
        _row("metrics.ready", "The page of metrics is served.", port="TCP port of the page"),
        _row("metrics.refused", "The page of metrics closed a connection; once for each reason.", "step reason"),
        _row("listing.ignored", "A bootstrap lists a run that is not shown: its manifest or its listing does not hold.",
             "step reason"),
        _row("log.continued", "A new file of the event log has begun.", "device version",
             peer="id of this peer", before="bytes of the log before this file"),
        _row("disk.short", "The disk has less room than the run needs.", "step reason remedy"),
        _row("disk.unknown", "The free room of the disk cannot be read.", "step reason"),
        _row("memory.short", "The memory is less than the run needs.", "step reason remedy"),
        _row("vectors.on_disk", "The flat vectors lie in a file: they do not fit into the memory.", "step reason remedy"),
        _row("clock.off", "The clock of this computer is wrong, by the median of the bootstraps.", "reason remedy"),
    ),
    "The evaluation of the shared model": (
        _row("eval.result", "What the drawn members have measured of the shared model.", "reason round",
             loss="median of their held-out losses, nats per token", by="ids of those that have stated one",
             prompts="the run's prompts, as far as they were continued", texts="what the model continues each of them with"),
        _row("eval.none", "No drawn member has published its evaluation of a round.", "step reason round"),
        _row("eval.unread", "The directory did not answer about an evaluation.", "peer step reason round"),
        _row("eval.refused", "A drawn member has published an evaluation of another state.", "peer step reason round"),
        _row("eval.unpublished", "My evaluation was not published.", "step reason round"),
        _row("eval.measured", "I was drawn, and have measured the shared model between two inner steps.",
             "round seconds", loss="its held-out loss, nats per token", tokens="held-out tokens of that loss"),
        _row("eval.failed", "I was drawn, and could not measure the shared model.", "step reason round"),
        _row("eval.skipped", "This peer evaluates nothing, though the run asks for it.", "step reason"),
    ),
    "Training": (
        _row("step", "The trainer reports, about once a second.", "loss tokens_per_s round peers sent received",
             step="number of the inner step", tokens="tokens of the run and of this phase so far",
             rung="worst rung among the connections to members: lan, direct, punched or relayed"),
        _row("phase.end", "An inner phase has ended.", "reason round loss", steps="inner steps of the phase",
             tokens="tokens of the phase", ramp="share of its weight that a newcomer's contribution has"),
        _row("inner.own_optimizer", "The caller's optimizer trains instead of the one that the run names; the reason says "
             "what of the run's recipe applies.", "step reason"),
        _row("data.order", "Whether the data loader of another library's trainer has an order of this peer's own.",
             "step reason"),
        _row("inner.cleared", "The loop clears gradients that were to accumulate: each batch is an optimizer step.",
             "step reason"),
        _row("inner.own_rates", "A scheduler of the caller's sets the learning rates from now on.", "step reason"),
        _row("device.bench", "The micro-batch is chosen, by measurement.", "tokens_per_s micro_batch",
             batch_size="samples of an inner step", memory_used="peak memory of the device, bytes",
             memory_total="memory of the device, bytes", model="name and size of what is trained",
             precision="of the passes: bf16, fp16 or fp32", hours="that the rest of the run takes at this speed"),
        _row("device.out_of_memory", "The device had too little memory; the micro-batch is halved.",
             "step reason micro_batch"),
        _row("step.skipped", "Gradients have overflowed in fp16: the inner step is skipped, its batch not counted.",
             "step reason", scale="factor of the loss from now on", skipped="steps skipped by this membership"),
        _row("device.threads", "The number of processor threads was chosen by measurement: at the start, or of slow steps.",
             "step reason", threads="threads that train from now on", most="threads that were tried at most"),
        _row("device.rests", "The training rests between inner steps, to stay below a user's limit; once a membership.",
             "step reason"),
        _row("device.unseen", "The GPU cannot be looked at, so that other programs' use of it is not noticed.",
             "step reason"),
        _row("device.uncompiled", "torch.compile has failed; the model trains without it.", "step reason"),
        _row("model.not_kept", "Parts of the model were not written to the disk, or no file holds them.", "step reason"),
        _row("network.died", "The network process has ended, and with it this peer.", "step reason"),
        _row("network.failed", "The network process could not carry out a command; training goes on.", "step reason"),
    ),
    "Data": (
        _row("data.own", "The peer trains on a data source of its own.", "step reason name"),
        _row("data.joined", "The model does not keep the examples of a sequence apart.", "step reason"),
        _row("data.shared", "A dataset is shared by leases.", "units epoch peers name"),
        _row("data.unshared", "A dataset is not shared: each peer trains on all of it.", "step reason units"),
        _row("data.awaited", "The data cannot be read now; the peer waits, and tries again.", "step reason",
             seconds="how long it waits, s"),
        _row("data.epoch", "The oldest unfinished epoch is another one.", "epoch"),
        _row("data.not_kept", "The progress in the data was not written to the disk.", "step reason"),
        _row("file.awaited", "No member that is here has a file of the run's data; training waits for one.", "step reason"),
        _row("data.missed", "A member has not said which files it holds, or has not served one.", "peer step reason"),
        _row("data.not_provided", "The run's data on this computer cannot be provided to members.", "step reason"),
        _row("data.forgotten", "The progress in the data cannot be read; it begins anew.", "step reason"),
        _row("unit.begun", "The lease of a unit of data was taken.", "step reason epoch unit",
             done="samples of it that were trained before"),
        _row("unit.dropped", "The lease of a unit of data was given up.", "step reason epoch unit"),
    ),
    "Rounds": (
        _row("round.awaited", "A round cannot be tried yet; training goes on.", "step reason round"),
        _row("round.possible", "The round can be tried now.", "step reason round"),
        _row("round.abstained", "The peer takes no part: its training has diverged.", "step reason round"),
        _row("round.overdue", "Training waits for the result of a round that runs for too long.", "step reason round"),
        _row("line.thin", "Rounds outlast the phases between them: training goes on, and H becomes longer.",
             "step reason remedy round"),
        _row("line.enough", "Rounds do not outlast the phases between them any more.", "step reason round"),
        _row("round.said", "A message of a round was sent.", "round attempt", step="type of the message"),
        _row("round.done", "The round is certified, and its result is here.",
             "round attempt roster seconds sent received root loss", cut="ids of the contributors that counted",
             credit="tokens of this peer's contribution that count, by the certificate; a keeper has none"),
        _row("round.void", "The attempt was given up here; a later one may still decide on what it made.", _ENDED),
        _row("round.missed", "The round went on without this peer.", _ENDED),
        _row("round.behind", "The others hold another state; it is fetched.", _ENDED),
        _row("round.given_up", "A member gave up the attempt.", _ATTEMPT),
        _row("round.part_missing", "A part of a contribution could not be fetched.", _ATTEMPT),
        _row("round.refused", "A member's message does not fit what it or others have signed before; it does not count.",
             _ATTEMPT, fault=Fault.OMISSION),
        _row("round.silent", "An owner sent no Have or output in time; its deputies make its part.", _ATTEMPT,
             fault=Fault.OMISSION),
        _row("relay.sought", "A member was lost to this peer; others are asked to pass on what it signs.",
             "peer step reason round"),
        _row("round.left_out", "A member of the roster is not in the cut.", _ATTEMPT, fault=Fault.OMISSION),
        _row("codec.changed", "A peer sends its contributions in another codec, as its line allows.",
             "step reason round attempt"),
        _row("round.masked", "A contribution counts as zeros in parts whose holders lack it.", _ATTEMPT,
             fault=Fault.OMISSION),
        _row("round.output_missing", "An output could not be fetched; another holder is asked.", _ATTEMPT,
             fault=Fault.OMISSION),
        _row("round.roster_refused", "A proposed roster was refused.", _ATTEMPT, fault=Fault.OMISSION),
        _row("round.zeros", "A part counts as zeros: the voters that were to make it again lack bytes of it.", _ATTEMPT),
        _row("round.output_doubted", "Sketches do not show an output to be the sum: voters make it again.", _ATTEMPT,
             fault=Fault.OMISSION),
        _row("round.equivocation", "A member signed two different messages for one slot.", _ATTEMPT,
             fault=Fault.COMMISSION),
        _row("peer.flagged", "The aggregation rule gives a contribution no weight.", _ATTEMPT),
        _row("certificate.hint", "A certificate does not end this peer's round; its carrier counts as ahead.",
             "peer step reason round"),
        _row("value.not_fetched", "What the voters have proven, or propose again, could not be fetched or checked.",
             "step reason round"),
        _row("fetch.retry", "A fetch of a part or an output failed; it is tried again.", "peer step reason"),
        _row("fetch.resumed", "A broken fetch goes on where it stopped.", "peer step reason",
             offset="bytes that are here"),
        _row("fetch.refused", "A request for bytes was refused.", "peer step reason"),
    ),
    "Agreement": (
        _row("agreement.behind", "More than 1/3 of the votes are in a later round; its certificates are sought.", _ATTEMPT),
        _row("vote.unheard", "A member did not say which round it votes in next.", "peer step reason"),
        _row("agreement.unsigned", "A statement of this peer's own was not signed; it is not counted.",
             "peer reason round attempt", step="type of the message"),
        _row("agreement.recalled", "A voter that lost its memory votes again: all are here, and have not decided.", _ATTEMPT),
        _row("agreement.attempt", "The voter has entered another attempt.", "reason round attempt",
             peer="id of the proposer of the attempt before", step="the attempt that begins"),
        _row("agreement.stalled", "Too few voters are here to decide: the round waits for the others.", _ATTEMPT),
        _row("agreement.refused", "A voter's statement or a decision was refused.", _ATTEMPT),
        _row("agreement.equivocation", "A voter signed two different statements of one kind in a slot.", _ATTEMPT,
             fault=Fault.COMMISSION),
    ),
    "State": (
        _row("state.taking", "The state is fetched from others; about once a second.", bytes="bytes that are here",
             total="bytes of the state", providers="number of peers that it comes from"),
        _row("state.synced", "The peer holds the run's state.", "round root seconds", peer="id of the provider, if any",
             bytes="bytes fetched"),
        _row("state.size", "A keeper has learned how long the run's state is.", "step reason",
             cells="cells of the vector of all parameters"),
        _row("state.awaited", "No reachable member holds the state; the peer waits.", "step reason round"),
        _row("state.retry", "The state could not be fetched from a peer; the next one is tried.", "peer step reason"),
        _row("state.not_offered", "A peer did not offer its state.", "peer step reason"),
        _row("state.leaf_missed", "A leaf of the state could not be fetched; another provider is asked.",
             "peer step reason"),
        _row("state.leaf_late", "Another provider sent the leaf first.", "peer step reason"),
        _row("state.restored", "The state was restored from the disk.", "round root",
             checkpoint="round of the checkpoint that it started from"),
        _row("state.rebased", "The peer moved to a newer state and kept its progress of the phase.", "step reason round",
             before="round of the state before"),
        _row("state.drift", "The outer step of this computer led to another root than the certified one.", "step reason",
             fault=Fault.COMMISSION),
        _row("round.replayed", "A missed round was replayed from its outputs.", "round root", bytes="bytes of its outputs"),
        _row("replay.failed", "A missed round could not be replayed.", "peer step reason round"),
        _row("head.ahead", "The directory has a newer head than any reachable member.", "step reason round tokens"),
        _row("head.refused", "The head in the directory is not by voters of the run; it is ignored.", "step reason round"),
        _row("head.unproven", "A member's head could not be proven; it counts as its word only.", "peer step reason round"),
        _row("chain.parted", "A member's chain has no certificate in common with this peer's, as far as both hold them.",
             "peer step reason round"),
        _row("chain.conflict", "There are two valid certificates of one round: this peer stops, and accuses.",
             "peer step reason round"),
        _row("voters.absent", "A newcomer's bootstraps are connected to too few of a run's voters for a round to end.",
             "step reason"),
        _row("anchor.chosen", "A newcomer starts from the certificate that more than half of its bootstraps name.",
             "step reason round"),
        _row("anchor.none", "No bootstrap names a certificate; a newcomer chooses among the members' heads.", "step reason"),
        _row("anchor.outvoted", "A bootstrap names another chain than more than half of them.", "peer step reason"),
        _row("watch.parted", "A member shows a chain that a watcher does not follow.", "peer reason round"),
        _row("watch.partial", "A watcher lacks the rounds before this one, until somebody has them.", "reason round"),
        _row("head.unpublished", "The head was not published in the directory.", "step reason"),
    ),
    "Checkpoints, outputs and the ledger": (
        _row("checkpoint.written", "A checkpoint is on the disk.", "round root", bytes="bytes of the state"),
        _row("checkpoint.superseded", "An older checkpoint is removed: the newest one is enough.", "step reason round"),
        _row("checkpoint.unwritten", "A checkpoint was not written.", "step reason round"),
        _row("checkpoint.void", "A checkpoint was discarded: it is not of the certified state.", "step reason round"),
        _row("checkpoint.damaged", "A checkpoint cannot be read.", "step reason"),
        _row("checkpoint.not_removed", "An old checkpoint was not removed.", "step reason"),
        _row("losses.unwritten", "The loss of a round, which draws the curve, was not written.", "step reason round"),
        _row("outputs.unwritten", "The outputs of a round were not written.", "step reason round"),
        _row("outputs.unreadable", "Kept outputs cannot be read.", "step reason"),
        _row("file.torn", "The half-written end of a log was cut off after a crash.", "step reason",
             name="file name", bytes="bytes cut off"),
        _row("file.damaged", "Damaged bytes of a log were skipped.", "step reason",
             name="file name", bytes="bytes skipped"),
        _row("file.unavailable", "A log cannot be opened; its records stay in memory.", "step reason", name="file name"),
        _row("ledger.opened", "The ledger is open.", "round tokens", first="first round whose certificate it has"),
        _row("ledger.unreadable", "A certificate cannot be read from the disk.", "step reason round"),
        _row("ledger.unwritten", "Certificates were not written.", "step reason round"),
        _row("ledger.replaced", "Rounds of this peer's chain gave way to the run's chain (fork choice).",
             "step reason round"),
        _row("ledger.left_behind", "Certificates that do not join the peer's state were dropped.", "step reason round"),
        _row("promise.kept", "A statement was not signed, since I may have signed another one; the attempt is given up.",
             "reason round attempt", step="type of the message"),
        _row("promise.unwritten", "A slot was not written to the disk, and nothing is signed in it.", "step reason round"),
        _row("promise.forgotten", "It is not known what this peer has signed; it begins far ahead in the coming rounds.",
             "step reason", attempt="first attempt in which it signs"),
        _row("promise.unreadable", "The signed slots on the disk cannot be read.", "step reason"),
    ),
    "Bans and charges": (
        _row("peer.charged", "A peer broke a rule of the protocol.", _ATTEMPT, fault=Fault.COMMISSION),
        _row("message.refused", "Messages were dropped unread: not from a member, or more than can be checked.",
             "peer step reason", origin="IP address of the last one", count="refusals since the last such event"),
        _row("peer.banned", "A peer was banned, by evidence or by the run's owner, or its ban was read from the disk.",
             "peer step reason", fault=Fault.COMMISSION),
        _row("peer.pardoned", "The run's owner lifted the ban of a peer.", "peer step"),
        _row("peer.refused", "A banned peer was refused.", "peer step reason"),
        _row("evidence.missing", "An accusation could not be judged: its exhibit is missing, or the settings of its round.",
             "peer step reason"),
        _row("evidence.dropped", "A conviction was not kept: too many are, it was pardoned, or it is of nobody's member.",
             "peer step reason"),
        _row("evidence.unproven", "A ban is kept without its evidence, which takes too much room.", "peer step reason"),
        _row("evidence.unwritten", "A conviction was not written to the disk.", "peer step reason"),
        _row("evidence.unavailable", "The file of convictions cannot be opened.", "step reason"),
    ),
    "Members and the directory": (
        _row("member.new", "A member counts: it was met, or enough others have met it.", "peer step reason"),
        _row("member.left", "A member has left.", "peer reason"),
        _row("member.back", "A member that was taken for lost has answered.", "peer step"),
        _row("member.refused", "A member record was refused.", "peer step reason"),
        _row("member.unreachable", "A member did not answer.", "peer step reason"),
        _row("peer.lost", "A peer was lost (failure detector).", "peer reason"),
        _row("peer.overslept", "This process was not scheduled; nobody is lost for that.", "step", seconds="for how long, s"),
        _row("gossip.failed", "The anti-entropy exchange with a member failed.", "peer step reason"),
        _row("directory.failed", "The directory could not be asked or written.", "peer step reason"),
        _row("directory.unanswered", "A directory server did not answer.", "peer step reason"),
        _row("directory.outdated", "A newer value stands under the key.", "step reason"),
        _row("directory.ignored", "A value of another protocol, or without a right to vote: nobody is charged.",
             "peer step reason"),
        _row("directory.junk", "The directory returned bytes that are no record.", "step reason"),
        _row("directory.republish_failed", "A value was not republished.", "step reason"),
        _row("member.clamped", "Figures of this peer did not fit its member record and were cut or left out.",
             "step reason"),
        _row("share.ignored", "A member's data share is malformed and was ignored.", "peer step reason"),
        _row("store.not_kept", "The directory server cannot write its file.", "step reason"),
    ),
    "Connections": (
        _row("host.port_taken", "The wished port is taken; the next free one is used.", port="TCP port that was wished",
             chosen="TCP port that is used"),
        _row("host.ipv4_only", "The host listens on IPv4 only.", "step reason"),
        _row("host.died", "The libp2p host has stopped.", "reason"),
        _row("connection.refused", "A connection was refused or evicted; repeats are counted.", "peer step reason",
             origin="IP address of the last one", count="refusals since the last such event"),
        _row("dial.failed", "A rung of the dial ladder failed.", "peer reason", step="rung that failed"),
        _row("connection.climbed", "A connection moved to a better rung.", "peer", step="rung that it has now"),
        _row("connection.alive", "A connection in doubt has shown a sign of life.", "peer step seconds"),
        _row("connection.dead", "A connection in doubt showed no sign of life and was closed.", "peer step reason seconds"),
        _row("punch.done", "A hole punch succeeded.", "peer seconds", step="rung"),
        _row("relay.refused", "A relay refused a reservation.", "peer step reason"),
        _row("relay.none", "No relay has room, and this peer needs one.", "reason remedy"),
        _row("relay.not_accepted", "A relayed connection was refused.", "peer step reason"),
        _row("reachability.decided", "The peer knows how others reach it.", "reason", step="rung on which others reach it"),
        _row("upnp.opened", "The router forwards a port.", "step", port=_ROUTER_PORT),
        _row("upnp.closed", "The router forwards the port no more.", "step", port=_ROUTER_PORT),
        _row("upnp.failed", "The router did not open or close a port.", "step reason", port=_ROUTER_PORT),
        _row("upnp.unreached", "The forwarded port does not reach this peer.", "peer step reason",
             port=_ROUTER_PORT),
        _row("stream.lost", "A stream broke.", "peer step reason"),
        _row("handler.failed", "A stream handler failed: a bug.", "peer step reason"),
        _row("task.broken", "A background task ended with a network error.", "reason", step="name of the task"),
    ),
    "Bootstraps": (
        _row("bootstrap.ready", "The bootstrap serves.", addresses="multiaddrs with its peer id"),
        _row("page.ready", "The web page is served.", port="TCP port of the page"),
        _row("websocket.ready", "A bootstrap accepts WebSockets.", port="TCP port", step="ws, or wss over TLS"),
        _row("page.refused", "The web page refused a request or closed a connection; once for each reason.", "step reason"),
        _row("bootstrap.left", "The bootstrap ends.", "reason"),
        _row("bootstrap.met", "Another bootstrap is connected.", "peer step"),
        _row("bootstrap.refused", "The bootstrap refused something; repeats are counted.", "peer step reason",
             origin="IP address of the last one", count="refusals since the last such event"),
        _row("tls.unread", "A renewed TLS certificate cannot be read; the old one stays.", "step reason"),
        _row("bootstrap.unreachable", "A bootstrap cannot be reached.", "peer step reason"),
        _row("head.followed", "The bootstrap follows the head of one more run.", "step reason round"),
        _row("head.kept", "The bootstrap does not know the later head of a run, and keeps its old one.", "step reason round"),
        _row("head.forgotten", "The bootstrap keeps the head of a run no more.", "step reason"),
        _row("head.unwritten", "The heads of the bootstrap's runs were not written or read.", "step reason round"),
        _row("bootstrap.lost", "The connection to a bootstrap broke.", "peer step reason"),
        _row("bootstrap.mute", "A bootstrap did not answer a question.", "peer step reason"),
        _row("bootstrap.over_https", "A bootstrap was reached over a WebSocket alone.", "peer step", reason="how"),
        _row("bootstrap.other_port", "A bootstrap was reached, but not from the listen port.", "peer step reason"),
        _row("door.remembered", "No bootstrap answered; a remembered member or hivemind is used.", "peer step reason"),
    ),
    "Simulations": (
        _row("peer.joined", "A newcomer was started.", "peer reason"),
        _row("peer.gone", "A peer was killed, or has left.", "peer reason"),
        _row("chaos.kill", "A peer is killed.", "peer reason"),
        _row("chaos.leave", "A peer leaves in order.", "peer reason"),
        _row("chaos.stall", "A peer falls silent.", "peer reason"),
        _row("chaos.cut", "A peer is cut off.", "peer reason"),
        _row("chaos.over", "A stall or a cut is over.", "peer reason"),
        _row("chaos.partition", "The network is partitioned.", "peer reason"),
        _row("chaos.heal", "The partition is healed.", "peer reason"),
        _row("attack.made", "An attacker broke the protocol.", step="what it did"),
    ),
}
"""The rows by subject, in the order of the page."""

EVENTS: Mapping[str, EventKind] = {kind.name: kind for rows in GROUPS.values() for kind in rows}


def faults_of(*kinds: Fault) -> frozenset[str]:
    """The names of the events that accuse their peer of such a fault."""
    return frozenset(name for name, kind in EVENTS.items() if kind.fault in kinds)


def why_not_event(record: Mapping[str, object]) -> str:
    """Why a record is no event of this table; empty if it is one."""
    kind = EVENTS.get(str(record.get("event")))
    if kind is None:
        return f"no event {record.get('event')!r} stands in peer/log/events.py"
    unknown = sorted(record.keys() - kind.fields.keys() - {"time", "event"})
    return f"the event {kind.name} has no field {', '.join(unknown)} in peer/log/events.py" if unknown else ""


def page() -> Iterator[str]:
    """The lines of the page of events, in Markdown."""
    yield from ("# Events", "")
    yield "Printed by `python -m flockstep.peer.log.events` from the table in `peer/log/events.py`; a test holds it against"
    yield "every `emit`. An event is one JSON object a line in `<home>/events.jsonl`: `time`"
    yield "(Unix seconds; virtual ones in simulations), `event`, and those of the fields below that apply. A fault is"
    yield "what an event accuses its peer of: *omission*, it did not do what it should have (a slow line looks the"
    yield "same); *commission*, it did what no honest peer does."
    for subject, rows in GROUPS.items():
        yield from ("", f"## {subject}", "", "| event | meaning | fields |", "|---|---|---|")
        for kind in rows:
            accused = f" *Fault: {kind.fault}.*" if kind.fault else ""
            fields = (f"`{name}`" + ("" if FIELDS.get(name) == it else f": {it}") for name, it in kind.fields.items())
            yield f"| `{kind.name}` | {kind.meaning}{accused} | {'; '.join(fields)} |"
    yield from ("", "## Common fields", "", "| field | meaning |", "|---|---|")
    yield from (f"| `{name}` | {meaning} |" for name, meaning in FIELDS.items())


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in page()))
