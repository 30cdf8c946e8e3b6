"""The web page of a run: `flockstep page`.

    assets   The files of the page, read once.
    page     `flockstep page`: follows a run as a light client, and serves what it sees.
    server   The web server of the page: the newest picture and the files, found by their names in memory.
    shown    A run's picture as its page fetches it: the newest rounds each time, those before them once.
"""
