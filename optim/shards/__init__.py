"""Packed data: shards of tokens with an index that pins them, made once and read from anywhere, verified by hash.

    cache       Shards on this computer: a folder of them, or a bounded cache that is filled ahead of the training.
    index       The index of packed data: its tokens' type, the tokenizer that made them, and the hash of each shard.
    members     The trainer's side of data from members: a place whose files the network process fetches by their hash.
    opening     What a member trains on, and the tokenizer that made it: the one way from a manifest to its data.
    packed      Packed data by their name: where they are, and their index, which a run pins.
    places      Where shards lie, such as a folder of this computer.
    reader      The training sequences of packed data, in units of whole shards.
    seeding     The network process's side of data from members: serves the files of a run's data by hash, and fetches them.
    tokenizer_config  What a tokenizer's file does not say: special tokens by their role, and the template of chats.
    web         Files of a web server or of the hub, by range, from public addresses alone where a stranger has named it.
"""
