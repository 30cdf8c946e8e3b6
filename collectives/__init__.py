"""collectives/: averaging among peers who may leave, lie or be slow."""
