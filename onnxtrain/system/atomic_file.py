"""Writes a file whole or not at all: a kill at any moment leaves the old file or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file beside `path` that takes its place when the block ends without an error.

    The data reaches the disk before the name does. A killed process leaves at most `.<name>.<hex>.partial` behind,
    which nothing reads. A symbolic link stays one: the file that it leads to is replaced.

    Raises:
        OSError: the folder is missing, not writable or full; the old file stays as it was.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:  # a keyboard interrupt too must not leave the partial file
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Makes the new name last through a power cut, where folders can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
