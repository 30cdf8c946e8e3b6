"""Who is in the run: the member table, its gossip, its members on disk.

    gossip      Gossip: anti-entropy and rumours, by which the member tables of a run become equal.
    presence    Presence: the failure detector of a run's membership, with heartbeats, goodbyes, expiry and returning
                members.
    remembered  The members of a run on disk: a restarted peer finds them again without any bootstrap.
    table       The member table: the newest record of every member of a run, made equal on all peers by anti-entropy.
"""
