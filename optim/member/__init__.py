"""A member of a run, whoever drives it, and both sides of the border to its trainer.

    apply        Applies a certified round: decodes its outputs, makes the outer step, and computes the next state
                 root.
    border       Defines what crosses between the trainer and its network process: commands, answers, notices, shared
                 vectors.
    catch_up     Brings my state to the run's: by replaying missed rounds, or by state transfer.
    client       One peer of a run, as its trainer drives it: when a phase ends, what becomes of Δ, whose state is taken.
    evaluations  Publishes my evaluations of the shared model, and reads those of the other drawn members until the run's
                 result is known.
    handed_over  Takes over what this computer holds of a run into the one that goes on from it: state, progress,
                 invitation, consent.
    held         Holds the state (θ, m) of one peer, its position in the run, and the ledger that follows it.
    member       One member of a run: holds its state, takes part in rounds, makes their outer steps, and catches up.
    participant  Runs one peer in the network process at its trainer's command: host, directory, membership, rounds
                 and state.
    progress     Reports the progress of a peer's training: losses and rates about once a second, sums over an inner
                 phase.
    reach        Reaches a run, and keeps in contact with it: host, directory, manifest and node, then the members and
                 what is published.
    share        Draws my share of a dataset as batches: leases units, publishes the leases, keeps my progress on
                 disk.
"""
