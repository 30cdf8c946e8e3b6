"""The all-reduce of one attempt: from contributions to checked outputs, under a roster. Pure.

    actions    The interface between a round and its driver: phases, setup, actions and outcome.
    asking     Whom I ask for what others have not sent me. Pure.
    check      CHECK: the outputs that the proposer names, and the sketches that verify them. Pure.
    collect    COLLECT: commitments, the parts that I hold, and my word on them. Pure.
    contributor  The state of an attempt of one member without a vote. Pure.
    exchange   One member's state of an attempt under a roster: COLLECT to CHECK, up to a value. Pure.
    facts      The message log of an attempt: deduplicates signed messages and detects equivocation. Pure.
    judge      JUDGE: sketches, the holders' words on them, and the weights that follow. Pure.
    outputs    REDUCE: the outputs of all parts, their providers, retries, and false ones. Pure.
    roster     A roster with its members' messages: owners, deputies, commits, words. Pure.
    stage      One exchange of words, up to the cut that names those that count. Pure.
    words      Who contributes: a function of the words that a cut names. Pure.
"""
