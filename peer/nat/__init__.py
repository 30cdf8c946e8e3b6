"""How others reach this peer: relay, hole punch, UPnP, dial-back.

    bootstraps    Connections to bootstraps: keep-alive, reachability checks, relay reservations.
    diagnose      Diagnosis of a bootstrap that did not answer, by probing other ports of its host.
    dialback      `/flockstep/dialback/1`: a bootstrap reports a peer's observed address, and dials it back.
    gateway       A home's router, asked by UPnP for its outside address and for ports.
    punch         Hole punching: upgrades a relayed connection between two peers behind NATs.
    reachability  Reachability: direct, punched or relayed, decided from what bootstraps observe. Pure.
    relay         The Circuit Relay v2 client: reservations, and dialling and accepting through a relay.
    upgrade       Upgrades a relayed connection: detects a better one, announces it, and closes the relayed one.
    upnp          UPnP port mapping: asks the home's router for a port that strangers can dial.
"""
