"""Training data: sources, tokens, units, and the leases by which peers share them.

    controls    Control tokens of a `tokenizer.json` under names that no text contains, so that no text can make one.
    datasets    What can be shared among peers: anything that is read in units, from a dataset with an index to an
                endless stream.
    hub         Files of a dataset of the Hugging Face hub: listed at one commit by its API, read by range, over https.
    lease_view  The network process's side of the leases: which member trains which part of the data, by the members'
                records.
    leases      Leases: which units of the data are mine to train now, so that peers neither do the same work twice
                nor leave any out.
    pages       Texts of a parquet file of a stranger, in bounded memory.
    rows        Rows of JSON files of a stranger, in bounded memory; and a count of the rows that are skipped.
    sources     Data sources by name, cut into sequences, and a held-out twentieth that nobody trains on.
    streams     Documents that are streamed: parquet and JSON files, here or on the Hugging Face hub, packed into
                sequences.
    text        The files of a place on this computer, and text from them; or from Python's standard library.
    tokenizer   From text to tokens: its bytes, or a tokenizer of Hugging Face's `tokenizers` whose file the manifest
                pins by hash.
    units       How a dataset is cut into units, the pieces that peers lease (`shards`), and how the items of a unit
                are ordered.
"""
