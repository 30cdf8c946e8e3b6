"""Training data: sources, tokens, units, and the leases by which peers share them."""
