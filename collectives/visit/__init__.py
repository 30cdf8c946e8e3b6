"""Asking the members of a run from outside: what a watcher shows, and who may appoint.

    polls     How the decision of a round stands, and appointments for one that has stalled.
    scores    The evaluations that drawn members have published.
    visited   Who is in a run, as a visitor learns it.
    watcher   Follows a run as a light client, and makes its picture.
"""
