"""Argument types that several commands share. argparse reports their errors in one line and exits with USAGE."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return int(text)


def existing_file(text: str) -> Path:
    """Parse the path of an existing file."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"file not found: {text}")
    return Path(text)


def existing_folder(text: str) -> Path:
    """Parse the path of an existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"folder not found: {text}")
    return Path(text)


def new_file(text: str) -> Path:
    """Parse the path of a file to write. Its folder must exist, which is checked before minutes of measuring."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing folder, got {text}")
    return Path(text)
