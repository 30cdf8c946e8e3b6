"""The round as a machine. Pure: no clock, no randomness, no sockets.

    deadlines  Adaptive timeouts for the phases of a round, estimated from measured durations. Pure.
    early      Round messages that arrive before my attempt of them, within a budget of bytes. Pure.
    gather     GATHER: the roster that the proposer makes of the Readys, and the reasons to refuse one. Pure.
    machine    The state machine of one attempt: from Ready to a value that is held and checked. Pure.
    vote       The decision of one round: messages become statements of the agreement, its actions messages. Pure.
"""
