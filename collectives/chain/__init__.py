"""The chain of certificates: quorum, ledger, fork choice, replay.

    certificate   Certificates of rounds: validation, hashes, and the result that they certify. Pure.
    chain         The hash chain of a run's certificates, and a state's position on it. Pure.
    fork_choice   Fork choice: which chain is the run's, and from which member to take its state. Pure.
    head          The published head: the chain's newest certificate, as a value in the run's directory.
    kept_outputs  A store of the encoded outputs of the last rounds, by hash, for replay.
    ledger        The ledger: the chain of a run's certificates, persisted on this peer's disk.
    losses        The loss of each round, as a member saw it, for whoever comes late.
    packed        Compression of certificates for ledger and directory; validation of consecutive ones.
    quorum        Quorum arithmetic, the rank order of proposers, and the draw of a round's members. Pure.
    reader        Reads a chain from any peer, forwards by quorums and backwards by hashes.
    replay        Log replay: fetch certificates and outputs of missed rounds, repeat the outer steps.
    voters        Who votes on a round: a function of the certificate before it, so that nobody counts differently. Pure.
"""
