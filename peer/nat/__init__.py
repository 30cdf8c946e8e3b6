"""How others reach this peer: relay, hole punch, UPnP, dial-back."""
