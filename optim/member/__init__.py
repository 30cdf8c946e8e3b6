"""A peer in a run: both sides of the process border, and catching up.

    apply        Applies a certified round: decodes its outputs, makes the outer step, and computes the next state
                 root.
    border       Defines what crosses between the trainer and its network process: commands, answers, notices, shared
                 vectors.
    catch_up     Brings my state to the run's: by replaying missed rounds, or by state transfer.
    evaluations  Publishes my evaluations of the shared model, and reads those of the other drawn members until the run's
                 result is known.
    held         Holds the state (θ, m) of one peer, its position in the run, and the ledger that follows it.
    member       One member of a run: holds its state, takes part in rounds, makes their outer steps, and catches up.
    membership   Decides for one peer of a run: when a phase ends, what becomes of Δ, whose state is taken. On the
                 first rank only.
    network      Runs the network process for the trainer: sends its commands, keeps what it reports, restarts it when
                 it dies.
    participant  Runs one peer in the network process at its trainer's command: host, directory, membership, rounds
                 and state.
    progress     Reports the progress of a peer's training: losses and rates about once a second, sums over an inner
                 phase.
    reach        Reaches a run, and keeps in contact with it: host, directory, manifest and node, then the members and
                 what is published.
    share        Draws my share of a dataset as batches: leases units, publishes the leases, keeps my progress on
                 disk.
"""
