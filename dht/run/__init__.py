"""The definition of a run: manifest, settings, admission, join link, statements of its owner.

    admission   Admission: which peers may take part in a run, and whose signature its certificates need. Pure.
    layout      Layouts: what a run trains, by name and shape, as its manifest pins it. Pure, without torch.
    link        Join links: a run id and its bootstraps in one line that survives chats, mails and reading aloud.
    listing     A listing: the owner's word that its run may be shown to everybody who asks a bootstrap for runs. Pure.
    manifest    The manifest: the signed settings that pin a run and give it its id.
    revision    Revisions: how the owner changes settings of a run that trains. Pure.
    settings    Settings: frozen dataclasses whose annotations are the schema of a TOML file, with clear errors.
    statements  Statements of a run's owner: whom it vouches for, revokes, bans and pardons. Pure.
    succession  Successions: how its owner ends a run, and has it go on as another one from the same state. Pure.
    protocol    The protocol number, which a run's manifest and its checkpoints state. Pure.
"""
