"""The directory of runs: a Kademlia client and server, and a directory in memory.

    interface   The interface of a directory of runs: put, get, provide and find.
    kademlia    The Kademlia client: signed values and provider records, looked up at the bootstraps.
    memory      A directory in memory, for the network in memory.
    messages    Kademlia's messages as libp2p encodes them: framing on a stream, and the peers that they name.
    routing     Kademlia's routing table: the directory servers that a node knows, few of any one network. Pure.
    server      The Kademlia server (`/ipfs/kad/1.0.0`): it serves any peer, within stated limits.
    store       The store of a directory server: values and provider records, within stated limits. Pure.
    store_file  The store of a directory server on disk: an append-only log (`peer.log.file`) that is compacted.
"""
