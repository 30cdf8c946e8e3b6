"""What peers answer for: trust, evidence, bans, and what they sign themselves.

    bans        Bans from the run: claims are judged, flooded to the members, and persisted on the disk.
    conduct     The conduct of peers in a run: signing guard, witness of equivocation, bans, trust.
    credit      Credit: the tokens of each peer that counted, and in how many rounds, summed over a chain of certificates.
                Pure.
    evidence    Evidence of misbehaviour that anybody can verify: equivocation and invalid bytes. Pure.
    patience    Who is waited for: a member that was waited for in vain is not in the rounds after it. Pure.
    signing     The signing guard: signs statements, and never two different ones on one subject in a slot.
    statements  The table of statements: their subjects, and which of them prove equivocation. Pure.
    trust       Trust: the weight that a peer has earned, from the chain of certificates alone. Pure.
    waiting     Claims that wait: those about a later round until it begins, and those whose exhibit is fetched.
"""
