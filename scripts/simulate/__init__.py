"""`flockstep simulate`: a swarm in virtual time."""
