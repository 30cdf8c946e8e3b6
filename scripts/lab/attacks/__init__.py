"""Attacks by name: on contributions, and on the protocol.

    gradients  Attacks on contributions by name, and custom ones, from all honest contributions.
    protocol   Attacks on the protocol by name: production peers of which one method is replaced.
"""
