"""Evaluation of the shared model while it trains: who is drawn for it by the chain, and what counts of what they state.

    draw    The members that evaluate the state after a round, drawn by its cut. Pure.
    result  The result of an evaluation: the median of the losses that the drawn members have stated. Pure.
"""
