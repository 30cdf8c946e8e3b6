"""The laboratory: what measures, simulates and attacks. A checkout has it, an installation has not.

    namespaces   Network namespaces as computers, with lines of a given rate, delay and loss between them; as root on Linux.
    verbs        `flockstep bench` and `flockstep simulate`: the verbs that measure and simulate, on this computer alone.
"""
