"""peer/: the ground: who I am, how bytes travel, the words, the dials."""
