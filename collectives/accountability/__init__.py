"""What peers answer for: trust, evidence, bans, and their own promises.

    bans        Bans from the run: claims are judged, flooded to the members, and persisted on the disk.
    conduct     The conduct of peers in a run: signing guard, witness of equivocation, bans, trust.
    evidence    Evidence of misbehaviour that anybody can verify: equivocation and invalid bytes. Pure.
    promises    The signing guard: persists the slots that I signed in, to rule out equivocation.
    statements  The table of statements: their subjects, and which of them prove equivocation. Pure.
    trust       Trust: the weight that a peer has earned, from the chain of certificates alone. Pure.
"""
