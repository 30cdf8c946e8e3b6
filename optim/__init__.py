"""optim/: what the averages are for: the outer loop, models, data, and the public `Swarm`."""
