"""Who is in the run: the member table, its gossip, its memory on disk.

    gossip      Gossip: the anti-entropy and the rumours by which the member tables of a run come to agree.
    presence    Presence: the failure detector of a run's membership: heartbeats, goodbyes, expiry, and members that
                are back.
    remembered  The members of a run on disk: a restarted peer finds them again without any bootstrap.
    table       The member table: the newest record of every member of a run, which anti-entropy makes equal on all
                peers.
"""
