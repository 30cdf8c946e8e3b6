"""What a bootstrap does for others: the relay server, under its limits.

    relay_server  The Circuit Relay v2 server: reservations and circuits, within `BootstrapLimits`.
    server        The server side of a bootstrap: gate, relay server, and counts of refusals.
"""
