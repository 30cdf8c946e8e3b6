"""`python -m flockstep`: the same as the `flockstep` command."""

from flockstep.scripts.cli.main import main

main()
