"""The same directory over a hivemind DHT (`flockstep[hivemind]`)."""
