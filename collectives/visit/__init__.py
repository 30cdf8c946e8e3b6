"""Asking the members of a run from outside: what a watcher shows.

    before    The credit of the runs that a run goes on from.
    polls     Which voters of the next round are here.
    scores    The evaluations that drawn members have published.
    visited   Who is in a run, as a visitor learns it.
    watcher   Follows a run as a light client, and makes its picture.
"""
