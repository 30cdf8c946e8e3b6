"""The round as a machine. Pure: no clock, no randomness, no sockets."""
