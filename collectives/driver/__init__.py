"""The driver of rounds: executes what the machines decide, and holds no rules.

    contribution  What a peer brings into an attempt, and what it has of it at the end.
    hints         What is heard of peers and chains that are not of my round, within bounds. Pure.
    incoming      Bytes on their way here from their source, and the members that wait for them here.
    relays        What a member signs reaches a member that has no session with it through two others.
    rounds        The driver from certificate to certificate: receives round messages and executes the actions of machines.
    work          The work of one attempt: encodes, fetches, sketches, reduces.
"""
