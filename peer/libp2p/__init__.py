"""py-libp2p put right: sockets, streams, dialling, fixes."""
