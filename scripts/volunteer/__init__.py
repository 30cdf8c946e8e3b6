"""A computer that its user needs, too: when it trains, and what starts it.

    availability  Looks whether a peer may train now: its user's pause, the hours, and what `policy` makes of the readings.
    control       `flockstep pause` and `flockstep resume`: the word of a user to the peer with this home folder.
    gpu           Reads an NVIDIA GPU through NVML: who uses it, its temperature and its power.
    hours         The hours of the day in which a volunteer's computer may train, such as 22-7.
    idle          Decides whether this computer is busy with other programs: two thresholds, two times. Pure.
    policy        Decides from readings of a computer whether a peer may train, must rest, or must leave. Pure.
    preferences   `config.toml` of the home folder: what a volunteer would else write behind every command.
    service       `flockstep service`: lets this computer start a peer by itself, look at it, and remove it.
    units         The files with which systemd, launchd and Windows start a peer, and the commands for them.
"""
