"""`python -m flockstep`: the same as the `flockstep` command."""

from flockstep.scripts.cli import main

main()
