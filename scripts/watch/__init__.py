"""Looking at a run, or at this computer's own peer, from a terminal.

    credit     `flockstep run credit`: the tokens of each contributor, summed over all certificates.
    snapshot   `flockstep run snapshot`: a run at one moment as signed JSON.
    status     `flockstep status`: how a run stands, or how this computer's own peer stands.
    top        `flockstep top`: a run in the terminal while it goes on.
    watching   The light client that stands behind all of them.
    words      A picture of a run in words.
"""
