"""Who is in the run: the member table, its gossip, its members on disk.

    body        What a member says of itself: the body of a member record, its limits, and what is clamped to them. Pure.
    claims      The claims in a member table: rows of peers that nobody is known to have met, within limits.
    evaluation  What a drawn member states about the shared model after a round: the body of an `eval` record, and its
                limits. Pure.
    gossip      Gossip: anti-entropy and rumours, by which the member tables of a run become equal.
    owner_log   The owner's statements that a peer holds, kept equal to those of the directory and of the other members.
    presence    Presence: the failure detector of a run's membership, with heartbeats, goodbyes, expiry and returning
                members.
    remembered  The members of a run on disk: a restarted peer finds them again without any bootstrap.
    table       The member table: the newest record of every member of a run, made equal on all peers by anti-entropy.
    vouchers    Who vouches for the presence of whom: the members' words on the sessions that they have.
"""
