"""The card of a published checkpoint: what it is, its curve, who has trained it, and what certifies it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...collectives.accountability.credit import PeerCredit
from ...dht.run.manifest import SignedManifest
from ...peer.base.plain import plain_text
from ...peer.base.transport import PeerId

MAX_POINTS = 50
"""Rows of the curve: the last one, and evenly spread ones before it."""
MAX_NAMED = 200
"""Contributors by name: of more the rest is one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A checkpoint that is to be published, and what its keeper knows of the run."""

    signed: SignedManifest
    link: str
    """Empty for a closed run, of which certificate and credit are for members only."""
    round: int
    root: str
    """The state root, in hex."""
    tokens: int
    certificate: str
    """The hash of its certificate, in hex; empty if there is none to show."""
    signers: int
    curve: Sequence[tuple[int, float]]
    """(round, loss on held-out data), in order."""
    credit: Sequence[PeerCredit]
    credit_from: int
    """The first round that is counted."""
    names: Mapping[PeerId, str]


def card_of(it: Published, library: str, base: str = "") -> str:
    """Return the card in Markdown, with the header that the hub reads; `base` is what an adapter is for."""
    return "\n".join(_lines(it, library, base)) + "\n"


def _lines(it: Published, library: str, base: str) -> Iterator[str]:
    manifest = it.signed.manifest
    yield from ("---", f"library_name: {library}")
    if base:
        yield f"base_model: {base}"
    yield from ("tags:", "- flockstep", "---", "", f"# {_cell(manifest.name)}", "")
    yield f"Trained by volunteers over the open internet with flockstep: round {it.round:,} of {manifest.num_rounds:,},"
    yield f"{it.tokens:,} tokens." + (f" Take part: `flockstep join '{it.link}'`" if it.link else "")
    yield from (
        "",
        "| | |",
        "|---|---|",
        f"| run | `{it.signed.run_id}` |",
        f"| model | {_cell(manifest.model_name)} |",
    )
    yield f"| state root | `{it.root}` |"
    if it.certificate:
        yield f"| certificate | `{it.certificate}`, signed by {it.signers} |"
        yield from (
            "",
            "`flockstep.json` has the certificate, `manifest.flockstep` is what the run's owner has signed.",
        )
    yield ""
    if it.curve:
        yield from ("## Loss on held-out data", "", "The median of what the members drawn for it have measured.", "")
        yield from ("| round | loss |", "|---:|---:|")
        yield from (f"| {round_:,} | {loss:.4f} |" for round_, loss in thinned(it.curve))
        yield ""
    if it.credit:
        since = "" if it.credit_from == 1 else f" since round {it.credit_from:,}, the first that this keeper has"
        yield from ("## Who has trained it", "", f"Tokens that counted, by the run's certificates{since}.", "")
        yield from ("| name | peer | tokens | rounds |", "|---|---|---:|---:|")
        for each in it.credit[:MAX_NAMED]:
            yield f"| {_cell(it.names.get(each.peer, ''))} | `{each.peer}` | {each.tokens:,} | {each.rounds:,} |"
        if rest := it.credit[MAX_NAMED:]:
            yield f"| {len(rest):,} more | | {sum(each.tokens for each in rest):,} | |"


def thinned(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most `MAX_POINTS` points of a curve, evenly spread, the last one among them."""
    step = -(-len(curve) // MAX_POINTS)
    return [point for place, point in enumerate(curve) if (len(curve) - 1 - place) % max(1, step) == 0]


def _cell(text: str) -> str:
    """Return a stranger's text as one that no Markdown or HTML is read from."""
    return "".join(f"&#{ord(letter)};" if letter in "<>&|`*_[]()#\\!:~@" else letter for letter in plain_text(text))
