"""optim/: training on the averages: the outer loop, models, data, and the public `Swarm`."""
