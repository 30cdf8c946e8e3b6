"""`flockstep demo`: several peers on this computer, one is killed, and a report."""
