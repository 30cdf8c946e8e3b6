"""Looking at a run, or at this computer's own peer, from a terminal.

    console    The door of tables and live views.
    credit     `flockstep run credit`: the tokens of each contributor, summed over all certificates.
    live_view  A live table of the peers and a progress bar, or plain lines without a terminal.
    status     `flockstep status`: how a run stands, once or while it goes on, or how this computer's own peer stands.
    story      The story of a run, folded from its peers' event logs.
    voters     Who votes in a run: in words for whoever publishes or joins it, and as its members are now.
    watching   The light client that stands behind all of them.
    words      A picture of a run in words.
"""
