"""The folder for measurements and compiled code of this machine. Its contents can be deleted at any time.

$ONNXTRAIN_CACHE_DIR, else $XDG_CACHE_HOME/onnxtrain, else ~/.cache/onnxtrain

If the latter two are not writable, a per-user folder in the system's temporary directory is used.
"""

from __future__ import annotations

import atexit
import functools
import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxtrain.log import warn

VARIABLE = "ONNXTRAIN_CACHE_DIR"


def cache_folder(kind: str) -> Path:
    """Return the folder for one kind of files.

    It may not exist yet; other processes may write to it at the same time.
    """
    from_variable = os.environ.get(VARIABLE)
    if from_variable:
        return Path(from_variable) / kind
    return _usable(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / kind


@functools.cache
def _usable(parent: str) -> Path:
    """Return the folder onnxtrain in `parent`; if it is not writable, a temporary one, with a warning."""
    folder = Path(parent, "onnxtrain")
    reason = _why_unusable(folder)
    if reason is None:
        return folder
    try:
        temporary = _temporary()
    except OSError:  # no folder is writable; the code that writes a file reports it
        return folder
    warn(
        f"the cache folder {folder} cannot be used ({reason}); using {temporary}. "
        f"Set {VARIABLE} to a writable folder to keep the cache."
    )
    return temporary


def _why_unusable(folder: Path) -> str | None:
    if not folder.is_absolute():
        return "not an absolute path"  # the home directory is unknown
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "not writable"


def _temporary() -> Path:
    """Return a folder that only this user can write to, the same in all processes; a new one if the name is taken.

    Libraries are loaded from it, so no other user may be able to put one there.
    """
    folder = Path(tempfile.gettempdir(), f"onnxtrain-{_user()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="onnxtrain-"))
    is_private = not hasattr(os, "getuid") or (state.st_uid == os.getuid() and not state.st_mode & 0o022)
    return folder if is_private and not folder.is_symlink() else Path(tempfile.mkdtemp(prefix="onnxtrain-"))


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to `target`; remove it at the end of the block, or at exit if that comes first.

    In the second case `tempfile.TemporaryDirectory` would raise a ResourceWarning, which a daemon thread cannot avoid.
    """
    folder = tempfile.mkdtemp(prefix=".building-", dir=target.parent)
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    try:
        yield Path(folder)
    finally:
        atexit.unregister(remove)
        remove()
