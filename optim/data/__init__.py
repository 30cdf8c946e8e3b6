"""Training data: tokens, units, and the leases by which peers share them.

    controls    Control tokens of a `tokenizer.json` under names that no text contains, so that no text can make one.
    datasets    What can be shared among peers: anything that is read in units, from a dataset with an index to an
                endless stream.
    lease_view  The network process's side of the leases: which member trains which part of the data, by the members'
                records.
    leases      Leases: which units of the data are mine to train now, so that peers neither do the same work twice
                nor leave any out.
    tokenizer   From text to tokens: its bytes, or a tokenizer of Hugging Face's `tokenizers`, whose file lies
                beside the tokens.
    units       How a dataset is cut into units, the pieces that peers lease (`shards`), and how the items of a unit
                are ordered.
"""
