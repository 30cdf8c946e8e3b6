"""Packs the data of a run on its owner's computer, the only one that reads documents: text, JSON, parquet, the hub.

    chat        Chats as text, by the template of their tokenizer, and where in it the answers stand.
    encode      Tokens of the parts of a source, cut into pieces, of which some will be held out.
    hub         Datasets and tokenizers of the Hugging Face hub, read with the user's token by the hub's own package.
    listing     The files of a place on this computer, and those of Python's standard library.
    pack        Makes packed data of a source: the same bytes of the same input, however often it is interrupted.
    skips       What of a source is left out, and why.
    sources     Sources of documents by name, in parts that are read independently of each other.
"""
