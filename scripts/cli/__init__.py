"""The command line. The only user of typer.

    bench      `flockstep bench` and `flockstep simulate`: the verbs that measure and try out, on this computer alone.
    bootstrap  The verb `flockstep bootstrap`: its options, each limit of `BootstrapLimits` among them.
    main       The `flockstep` command: verbs only; what stands behind each verb is in the file of its name.
    options    The options that several verbs share, and the settings of a peer that they make.
    run        `flockstep run`: the verbs to make a run, to invite to it and to look at it.
"""
