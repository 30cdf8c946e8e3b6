"""`flockstep demo`: several peers on this computer, one is killed, and a report.

    charts    A run's loss as inline SVG: a line per peer, held-out loss before and after, rounds.
    demo      `flockstep demo`: a bootstrap and several real peers on this computer train one model.
    evaluate  The held-out loss of a run's model, and a sample of its text.
    report    `report.html` and `summary.json` of a demo: a self-contained page, and its figures.
    style     The style sheet of the report: light and dark, wide and narrow, screen and paper.
"""
