"""dht/: rendezvous and membership: signed records, the directory, members, manifests and join links."""
