"""The web page of a run: `flockstep page`, and the pages of the runs that a bootstrap serves.

    assets   The files of the page, read once.
    page     `flockstep page`: follows a run as a light client, and serves what it sees.
    runs     The pages of the runs that a bootstrap serves.
    server   The web server of the page: the newest pictures and the files, found by their names in memory.
    shown    A run's picture as its page fetches it: the newest rounds each time, those before them once.
"""
