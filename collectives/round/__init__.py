"""The round as a machine. Pure: no clock, no randomness, no sockets.

    actions    The interface between a round and its driver: phases, setup, actions and outcome.
    collect    COLLECT: commitments, the parts that I hold, and the cut that follows. Pure.
    deadlines  Adaptive timeouts for the phases of a round, estimated from measured durations. Pure.
    early      Round messages that arrive before my attempt of them, within a budget of bytes. Pure.
    exchange   A round under a certified roster: COLLECT to CONFIRM, up to a quorum of results. Pure.
    facts      The message log of a round: deduplicates signed messages and detects equivocation. Pure.
    gather     GATHER: the roster that the proposer makes of the Readys, and the reasons to refuse one. Pure.
    judge      JUDGE and CHECK of one cut: weights of contributions, verification of outputs. Pure.
    machine    The state machine of one attempt: from Ready to a value that is held and checked. Pure.
    outputs    REDUCE: the outputs of all parts, their providers, retries, and false ones. Pure.
    roster     A roster with its members' messages: owners, deputies, commits, holdings. Pure.
    vote       The decision of one round: messages become statements of the agreement, its actions messages. Pure.
"""
