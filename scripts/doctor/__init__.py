"""`flockstep doctor`: what keeps this computer out of a run.

    doctor       `flockstep doctor`: checks that this computer, its network and the run allow taking part.
    machine      Checks of this computer with the standard library alone: Python, home folder.
    network      Checks of the network as `join` uses it: each bootstrap, my reachability, the run.
    process      The parent's end of `torch_child`: starts the process that loads torch, reads its results.
    sheet        The sheet of `flockstep doctor`: each check passes, fails or is skipped, written at once.
    torch_child  The child process of `flockstep doctor` that loads torch, finds the device, and sizes a model.
    visit        The checks that need flockstep's packages: network and torch concurrently, to a deadline.
"""
