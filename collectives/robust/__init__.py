"""Robust aggregation: the rules, their sketches, and the checks of outputs. Pure."""
