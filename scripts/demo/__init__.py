"""`flockstep demo`: several peers on this computer, one is killed, and what was found.

    demo       `flockstep demo`: a bootstrap and several real peers on this computer train one model.
    evaluate   The held-out loss of a run's model before and after it, and what it then continues the run's prompts with.
    findings   What a demo has found: the lines that it prints at the end, and `summary.json`.
    local_run  A run on this computer, for examples and for testing a training loop.
    processes  Child processes: logged to a file each, watched, killed, never left behind.
"""
