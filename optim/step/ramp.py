"""How many batches make one optimizer step: 1, 2, 4, 8, rising by quarters of the run. Pure.

The noise of the gradient of one batch, not the number of rounds, keeps a swarm above data parallel: the noise scale
(arXiv:1812.06162) grows tenfold while a run trains, so larger steps cost least at its end. A phase keeps its batches,
bytes and tokens. The learning rates are multiplied by √n, as the noise of a mean of n gradients falls by it
(arXiv:2405.14578 for Adam); docs/log.md has what this closes of the gap.
"""


def batches_a_step(ramp: int, round_: int, rounds: int) -> int:
    """Return n, the batches of one optimizer step in round `round_`, from 1 on, of `rounds`; `ramp` is the most."""
    return max(1, min(ramp, 1 << min(3, 4 * (round_ - 1) // rounds)))


def is_step(batch: int, n: int, phase: int) -> bool:
    """Return True if an optimizer step follows the `batch`-th batch, from 1 on, of a phase of `phase` batches.

    The phase has max(1, round(phase / n)) steps, spread evenly, the last one after its last batch.
    """
    steps = max(1, round(phase / n))
    return batch * steps // phase > (batch - 1) * steps // phase
