"""The directory of runs: Kademlia, client and server, and one in memory."""
