"""Attacks by name: on contributions, and on the protocol."""
