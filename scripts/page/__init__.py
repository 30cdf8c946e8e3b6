"""The web page of a run: `flockstep page`, and the pages of the runs that a bootstrap serves.

    assets   The files of the page, read once.
    delta    The difference between two JSON values.
    feed     A run's picture for many viewers: the whole, then what changed, a bounded queue for each.
    page     `flockstep page`: follows a run as a light client, and serves what it sees.
    runs     The pages of the runs that a bootstrap serves.
    server   The web server, in a thread of its own.
"""
