"""What arguments of several commands must be: types for argparse, which ends the process with USAGE and one line."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {text}")
    return int(text)


def existing_file(text: str) -> Path:
    """The path of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def existing_folder(text: str) -> Path:
    """The path of a folder that is there."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def new_file(text: str) -> Path:
    """The path of a file to write, in a folder that is there: said before minutes of measuring."""
    if Path(text).is_dir() or not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} must be a file in a folder that exists")
    return Path(text)
