"""Agreement on one hash: single-shot Tendermint among voters with votes. Pure: no clock, no randomness, no sockets.

    actions     The interface between the machine and its driver: timing, and what the driver must do. Pure.
    collected   The newest statement of each kind by each voter, and the quorums among them. Pure.
    electorate  Voters and their votes: quorum, proposer, and the slot that enough of them have reached. Pure.
    machine     The state machine of one decision at one voter: rules, locks and attempts. Pure.
    statements  Slots, the four statements, and the two quorum certificates: proof and decision. Pure.
    validity    The reasons to refuse a statement, whatever my own state is. Pure.
"""
