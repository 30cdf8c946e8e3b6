"""Training as a member of a run: the public `Swarm`, and the loop of `flockstep join` around it.

    device      Chooses the device to train on.
    evaluating  The loss of a language model on the run's held-out text, and what it continues a few prompts with.
    fit         How a run fits its lines: the pace of its rounds, and the settings with which they would fit. Pure.
    lines      What a program with a `Swarm` writes to stderr where it takes no events itself.
    pin         What `run create` asks of a manifest's model and data, by a process of its own.
    ranks       The processes of one peer, one for each GPU, as `torchrun` starts them.
    swarm       `Swarm`, the public API: makes any training loop one peer of a run.
    threads     How many processor threads train fastest beside what else runs on this computer.
    trainer     Runs the training of `flockstep join`: model, data and optimizer from the manifest.
"""
