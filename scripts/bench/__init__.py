"""`flockstep bench`: measurements side by side with other systems."""
