"""Looking at a run, or at this computer's own peer, from a terminal.

    credit     `flockstep run credit`: the tokens of each contributor, summed over all certificates.
    snapshot   `flockstep run snapshot`: a run at one moment as signed JSON.
    status     `flockstep status`: how a run stands, once or while it goes on, or how this computer's own peer stands.
    watching   The light client that stands behind all of them.
    words      A picture of a run in words.
"""
