"""What a bootstrap does for others: the gate and the relay server.

    gate          Admission control for a bootstrap's connections: limits per origin, idle timeouts.
    relay_server  The Circuit Relay v2 server: reservations and circuits, within `BootstrapLimits`.
    server        The server side of a bootstrap: gate, relay server, and counts of refusals.
"""
