"""The command line. The only user of typer.

    bootstrap  `flockstep bootstrap`: its options; each field of `BootstrapLimits` becomes one.
    data       `flockstep data`: the verb that makes the data of a run ready for its volunteers.
    echo       The door of the command line: every line of a verb leaves through it.
    main       The `flockstep` command: verbs only; the work of each verb is in the file of its name.
    options    The options that several verbs share, and the settings of a peer that they give.
    run        `flockstep run`: the verbs that create a run, invite to it and show it.
    service    `flockstep service`: the verbs that let this computer start a peer by itself.
"""
