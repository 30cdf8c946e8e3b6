"""`flockstep doctor`: what keeps this computer out of a run."""
