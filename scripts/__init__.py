"""scripts/: the command line, and the implementation of each verb."""
