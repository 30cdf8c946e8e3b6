"""scripts/: the front doors: the command line and what stands behind each verb."""
