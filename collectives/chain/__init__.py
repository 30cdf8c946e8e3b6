"""The chain of certificates: quorum, ledger, fork choice, replay."""
