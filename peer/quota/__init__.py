"""How much any stranger may take: limits, origins, refusals."""
