"""Write a file atomically: a kill at any moment leaves either the old file or the new one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`; it replaces `path` if the block ends without an error.

    The data is synced to disk before the rename. A killed process leaves at most `.<name>.<hex>.partial`, which nothing
    reads. If `path` is a symbolic link, its target is replaced and the link stays.

    Raises:
        OSError: the folder is missing, not writable or full; the old file is unchanged.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:  # also a KeyboardInterrupt must not leave the partial file
        with suppress(FileNotFoundError):
            partial.unlink()
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut, on systems where a folder can be opened (not on Windows)."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
