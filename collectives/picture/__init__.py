"""A run as data: what a light client verifies of its chain and what its members claim, in one typed picture. Pure.

    figures       A picture as JSON, as `flockstep status --json` and the page show it.
    fold          Folds the certificates of a run, forwards and backwards, into rows, the last rounds and trust.
    picture       The picture: progress, rounds, members, votes, evaluations, credit, troubles.
    progress      How far a run is, how fast it is, and whether it goes on.
    shown         What members claim of themselves, made plain and joined with what the chain shows of them.
    votes         The voters of a run's next round, and which of them are here.
"""
