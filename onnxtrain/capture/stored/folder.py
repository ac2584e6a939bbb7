"""The folder of captures: `<key>-<content>.capture`. Processes may read, write and clear it side by side.

A file gets its name when it is whole, and is never written again; the least recently used go when there is no room.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from onnxtrain.log import LOG, warn_once
from onnxtrain.system.atomic_file import replacing

_ABANDONED_S = 3600.0  # a partial file so old belongs to a process that was killed
_MOST_OF_A_KEY = 32  # files that differ in sizes or in the module's attributes


class CaptureFolder:
    """Captures on disk.

    Args:
        folder: made where it is missing.
        most_bytes: all files together.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def read(self, key: str) -> Iterator[tuple[Path, bytes]]:
        """The files of a key, the last used first. Nothing where the folder cannot be read: then once a warning."""
        try:
            found = [(file.stat().st_mtime, file) for file in self._folder.glob(f"{key}-*.capture") if _is_ours(file)]
        except OSError as error:
            warn_once(f"the captures in {self._folder} cannot be read, and are made anew: {error}")
            return
        for _, file in sorted(found, reverse=True)[:_MOST_OF_A_KEY]:
            try:
                data = file.read_bytes()
            except OSError as error:
                if file.exists():  # else another process removed it
                    warn_once(f"the capture {file} cannot be read, and is made anew: {error}")
                continue
            yield file, data

    def used(self, file: Path) -> None:
        """Notes that a file was used; where others may only read, it is not noted."""
        with suppress(OSError):
            os.utime(file)

    def add(self, key: str, data: bytes) -> Path | None:
        """Writes a file; None, with one warning, where that is not possible."""
        file = self._folder / f"{key}-{hashlib.sha256(data).hexdigest()[:16]}.capture"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(file) as target:
                target.write(data)
        except OSError as error:
            warn_once(f"captures are not kept in {self._folder}: {error}")
            return None
        self._make_room(file)
        return file

    def _make_room(self, newest: Path) -> None:
        """Removes what was not used for longest, until the rest fits; and what killed processes left."""
        found: list[tuple[float, int, Path]] = []
        for file in self._folder.glob("*.capture*"):
            with suppress(FileNotFoundError):
                state = file.stat()
                found.append((state.st_mtime, state.st_size, file))
        for file in self._folder.glob(".*.capture.*.partial"):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > _ABANDONED_S:
                    file.unlink()
        total = sum(size for _, size, _ in found)
        for _, size, file in sorted(found):
            if total <= self._most_bytes or file == newest:
                break
            with suppress(OSError):
                file.unlink()
            total -= size
            LOG.info("removed the capture %s, the least recently used: there is room for %d", file, self._most_bytes)


def _is_ours(file: Path) -> bool:
    """Whether the file is this user's or the system's: a stranger's is not read."""
    return not hasattr(os, "getuid") or file.stat().st_uid in (os.getuid(), 0)
