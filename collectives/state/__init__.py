"""The state θ and m: on disk, and from other peers leaf by leaf."""
