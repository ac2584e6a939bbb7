"""Compile regions once per machine, in another process, and cache the libraries on disk."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from filelock import FileLock

from onnxtrain.execute.regions.process import Process
from onnxtrain.execute.regions.request import LIBRARY
from onnxtrain.log import warn
from onnxtrain.native import background
from onnxtrain.native.build import BuildError, is_intact, require_compiler
from onnxtrain.system.cache_folder import cache_folder, scratch_folder

_LIMIT_S = 1800  # a region takes up to 25 s of processor time, and training may leave it a quarter of a processor
_process = Process()
_refused: dict[str, str] = {}  # why a region has no kernel in this process, by the key of its request
_refused_lock = threading.Lock()


class Request(Protocol):
    """A unit of work for the compiling process."""

    @property
    def file_prefix(self) -> str:
        """The beginning of the library's name."""

    @property
    def problem(self) -> str:
        """The beginning of the warning if it is not compiled; the reason follows."""

    @property
    def key(self) -> str:
        """A hash of everything that determines the library."""

    def write(self, folder: Path) -> None:
        """Write the request to a folder."""


R = TypeVar("R", bound=Request)


def build(requests: Sequence[R], dump: Path | None = None) -> Iterator[tuple[R, Path | BuildError]]:
    """Get the libraries of regions from the cache or the compiling process. Not for the main thread: it takes minutes.

    Args:
        requests: the regions, in the order in which they are compiled.
        dump: a folder to which their graphs and libraries are written too.

    Yields:
        Each request with its library, or with the reason why it has none: it cannot be compiled, or `refuse` was
        called for it.
    """
    with _process.keep_alive():
        for request in requests:
            yield request, _build_one(request, dump)


def refuse(request: Request, reason: str) -> None:
    """Run a region unfused in this process. Each reason is logged once."""
    with _refused_lock:
        is_new = reason not in _refused.values()
        _refused[request.key] = reason
    if is_new:
        warn(f"{request.problem}: {reason}")


def _build_one(request: Request, dump: Path | None) -> Path | BuildError:
    if request.key in _refused:
        return BuildError(_refused[request.key])
    try:
        library = _cached_library(request)
        if dump is not None:
            folder = dump / library.stem
            folder.mkdir(parents=True, exist_ok=True)
            request.write(folder)
            shutil.copyfile(library, folder / LIBRARY)
        return library
    except BuildError as reason:
        return reason
    except (OSError, NotImplementedError) as error:  # the latter from a file system without locks
        return BuildError(f"the folder of compiled regions cannot be used: {error}")


def _cached_library(request: Request) -> Path:
    """Return the path of the library in the cache; compiles it first if it is missing."""
    folder = cache_folder("regions")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = f"{request.file_prefix}-{request.key}"
    target = folder / f"{name}.so"
    with FileLock(folder / f".{name}.lock"):  # the ranks of one training ask for the same library
        if not is_intact(target):
            with background.take_ticket():
                _compile(request, target)
    return target


def _compile(request: Request, target: Path) -> None:
    require_compiler("compiled regions")
    with scratch_folder(target) as scratch:
        request.write(scratch)
        _process.compile(scratch, target.parent / "inductor", _LIMIT_S)
        library = scratch / LIBRARY
        if not is_intact(library):
            raise BuildError("the compiler of regions wrote no complete library")
        os.replace(library, target)
