"""A peer in a run: both sides of the process border, and catching up."""
