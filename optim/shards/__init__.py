"""Packed data: shards of tokens with an index that pins them, made once and read from anywhere, verified by hash.

    cache       Shards on this computer: a folder of them, or a bounded cache that is filled ahead of the training.
    chat        Chats as text, by the template of their tokenizer, and where in it the answers stand.
    index       The index of packed data: its tokens' type, the tokenizer that made them, and the hash of each shard.
    members     The trainer's side of data from members: a place whose files the network process fetches by their hash.
    opening     What a volunteer trains on: packed data by their name, or any other source.
    packed      Packed data by their name: where they are, and their index, which a run pins.
    pack        Makes shards of documents with a tokenizer: the same bytes of the same input, on any computer.
    places      Where shards lie: a folder, a web server, a dataset of the hub.
    reader      The training sequences of packed data, in units of whole shards.
    seeding     The network process's side of data from members: serves the files of a run's data by hash, and fetches them.
    tokenizer_config  What a tokenizer's file does not say: special tokens by their role, and the template of chats.
    web         Files of a web server, by range, from public addresses alone where a stranger has named it.
"""
