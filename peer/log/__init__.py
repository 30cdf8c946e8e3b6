"""What a peer writes down: events, figures that follow from them, and logs of checksummed records.

    events     The table of events: every event name, its fields with their units, and what it means.
    file       An append-only log of checksummed records that survives a crash in mid-write and a full disk.
    metrics    Figures for Prometheus, and the page that shows them.
    telemetry  Typed events to JSONL, and the last values of counters.
    web        A small web server on threads of its own, for pages that are only read.
"""
