"""Captures on disk, so that a later run of the same program need not capture again."""
