"""The border between the training process and the network process.

    bridge      Connects the training process and the network process: typed commands, answers and notices over a
                pipe.
    confined    A child process with limits on memory and processor time, in which a parser reads strangers' files.
    shared      Maps flat float32 vectors into the training process and the network process: one file, no copies.
    typed_json  Encodes typed values as JSON and decodes them by their annotations: dataclasses, bytes, tuples,
                enumerations.
"""
