"""Where onnxtrain keeps what it measured and compiled on this machine. All of it can be made again.

$ONNXTRAIN_CACHE_DIR, else $XDG_CACHE_HOME/onnxtrain, else ~/.cache/onnxtrain

The latter two give way to a folder of this user's among the temporary files where they cannot be written.
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
    """The folder for one kind of files. It may not be there yet; others may write to it at the same time."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own) / kind
    return _usable(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / kind


@functools.cache
def _usable(parent: str) -> Path:
    """Onnxtrain's folder in `parent`; a temporary one, with a warning, where that cannot be written."""
    folder = Path(parent, "onnxtrain")
    reason = _why_not(folder)
    if reason is None:
        return folder
    try:
        instead = _temporary()
    except OSError:  # no folder can be written at all: who writes logs it
        return folder
    warn(
        f"the cache folder {folder} cannot be used ({reason}), so {instead} is. Set {VARIABLE} to a folder that lasts."
    )
    return instead


def _why_not(folder: Path) -> str | None:
    if not folder.is_absolute():
        return "it is not an absolute path"  # as where no home is known
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def _temporary() -> Path:
    """A folder that only this user can write, the same in all processes; a fresh one where another user took its name.

    Libraries are loaded from it: nobody else may put one there.
    """
    folder = Path(tempfile.gettempdir(), f"onnxtrain-{_user()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
    except OSError:
        return Path(tempfile.mkdtemp(prefix="onnxtrain-"))
    own = not hasattr(os, "getuid") or (state.st_uid == os.getuid() and not state.st_mode & 0o022)
    return folder if own and not folder.is_symlink() else Path(tempfile.mkdtemp(prefix="onnxtrain-"))


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()


@contextmanager
def scratch_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target`, removed at the end of the block, or of a program that ends before it.

    `tempfile.TemporaryDirectory` gives a ResourceWarning then, although a daemon thread cannot do better.
    """
    folder = tempfile.mkdtemp(prefix=".building-", dir=target.parent)
    remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)
    try:
        yield Path(folder)
    finally:
        atexit.unregister(remove)
        remove()
