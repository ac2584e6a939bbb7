"""Read and write the files of captures, `<key>-<content>.capture`. Several processes may do so at the same time.

A file gets its name when it is complete, and is never written again. The least recently used files are removed to stay
within the size limit.
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

_ABANDONED_S = 3600.0  # a partial file this old was left by a process that was killed
_MAX_FILES_OF_KEY = 32  # such files differ in the sizes or in the module's attributes


class CaptureFolder:
    """Captures on disk.

    Args:
        folder: created when the first capture is stored.
        max_bytes: the limit for the size of all files together.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, key: str) -> Iterator[tuple[Path, bytes]]:
        """Yield the files of a key, most recently used first. Files that cannot be read are skipped with a warning."""
        try:
            files = [(file.stat().st_mtime, file) for file in self._folder.glob(f"{key}-*.capture") if _is_ours(file)]
        except OSError as error:
            warn_once(f"cannot read the captures in {self._folder} ({error}); capturing again")
            return
        for _, file in sorted(files, reverse=True)[:_MAX_FILES_OF_KEY]:
            try:
                data = file.read_bytes()
            except OSError as error:
                if file.exists():  # otherwise another process removed it
                    warn_once(f"cannot read the capture {file} ({error}); capturing again")
                continue
            yield file, data

    def lock_file(self, key: str) -> Path:
        """Return the file that a process locks while it captures."""
        return self._folder / f".{key}.lock"

    def mark_used(self, file: Path) -> None:
        """Set the time of last use of a file, if the folder is writable."""
        with suppress(OSError):
            os.utime(file)

    def add(self, key: str, data: bytes) -> Path | None:
        """Write a file and return its path; None, with a warning, if it cannot be written."""
        file = self._folder / f"{key}-{hashlib.sha256(data).hexdigest()[:16]}.capture"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(file) as target:
                target.write(data)
        except OSError as error:
            warn_once(f"cannot store captures in {self._folder}: {error}")
            return None
        self._remove_old(newest=file)
        return file

    def _remove_old(self, newest: Path) -> None:
        """Remove the least recently used files beyond the size limit, and partial files of killed processes."""
        files: list[tuple[float, int, Path]] = []
        for file in self._folder.glob("*.capture*"):
            with suppress(FileNotFoundError):
                status = file.stat()
                files.append((status.st_mtime, status.st_size, file))
        for file in self._folder.glob(".*.capture.*.partial"):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > _ABANDONED_S:
                    file.unlink()
        total = sum(size for _, size, _ in files)
        for _, size, file in sorted(files):
            if total <= self._max_bytes or file == newest:
                break
            with suppress(OSError):
                file.unlink()
            total -= size
            LOG.info("removed the least recently used capture %s: the limit is %d bytes", file, self._max_bytes)


def _is_ours(file: Path) -> bool:
    """Return whether the file belongs to this user or to root. Files of other users are not read."""
    return not hasattr(os, "getuid") or file.stat().st_uid in (os.getuid(), 0)
