"""The flat vector on the wire: how it is cut into fragments and parts, and how those become few bytes and back.

    arrays     Types of the flat vectors that every floor above passes on.
    codec      Flat float32 vectors to few bytes and back, with error feedback.
    lines      The members' lines, as their receivers measured them, and the parts and codecs that follow. Pure.
    mixed      A codec of several, of which each sender of a round uses the one that its line allows.
    partition  Which cells of the vector a round averages, and which member reduces which of them. Pure.
"""
