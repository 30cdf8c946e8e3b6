"""Who is in the run: the member table, its gossip, its memory on disk."""
