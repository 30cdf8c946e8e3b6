"""The command line. The only user of typer."""
