"""The network in memory, under virtual time."""
