"""dht/: finding each other: signed records, the directory, members, manifests and join links."""
