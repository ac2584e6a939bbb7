"""Store captures on disk, so that a later run of the same program does not capture again."""
