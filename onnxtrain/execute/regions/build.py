"""Compiles a region once a machine, in another process, and keeps the library on disk."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from filelock import FileLock

from onnxtrain.cache_folder import cache_folder
from onnxtrain.execute.regions.request import LIBRARY, Request
from onnxtrain.native import compiler
from onnxtrain.native.build import BuildError, in_background, is_whole

_LOG = logging.getLogger(__name__)
_CHILD = "onnxtrain.execute.regions.child"
_LIMIT_S = 1800  # about 20 s of a processor that the training leaves a tenth of
_turn = threading.Lock()  # one compiler at a time
_refused: dict[str, str] = {}  # why a region has no kernel in this process, by the key of its request


def build(request: Request, dump: Path | None = None) -> Path:
    """The library of a region, from the cache or by the other process. Called off the main thread: it takes minutes.

    Args:
        request: the region.
        dump: where its graph and its library are written too.

    Raises:
        BuildError: it cannot be compiled, or `refuse` was called for it.
    """
    if request.key in _refused:
        raise BuildError(_refused[request.key])
    try:
        return _built(request, dump)
    except (OSError, NotImplementedError) as error:  # the latter from a file system without locks
        raise BuildError(f"the folder of compiled regions cannot be used: {error}") from error


def refuse(request: Request, reason: str) -> None:
    """Leaves a region to its operators, in this process. Each reason is logged once."""
    if reason not in _refused.values():
        _LOG.warning("A fused region is not there, its operators run one by one instead: %s", reason)
    _refused[request.key] = reason


def _built(request: Request, dump: Path | None) -> Path:
    folder = cache_folder("regions")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / f"region-{request.key}.so"
    # Several processes of one training want the same.
    with _turn, FileLock(folder / f".region-{request.key}.lock"):
        if not is_whole(target):
            _compile(request, target)
    if dump is not None:
        own = dump / target.stem
        own.mkdir(parents=True, exist_ok=True)
        request.write(own)
        shutil.copyfile(target, own / LIBRARY)
    return target


def _compile(request: Request, target: Path) -> None:
    if not sys.platform.startswith("linux"):
        raise BuildError(f"compiled regions are for Linux, this is {sys.platform}")
    if compiler.find() is None:
        raise BuildError("there is no C++ compiler (looked for $CXX, c++, g++, clang++)")
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        request.write(Path(scratch))
        command = [
            "env",
            "OMP_NUM_THREADS=1",
            "TORCHINDUCTOR_COMPILE_THREADS=1",
            f"TORCHINDUCTOR_CACHE_DIR={target.parent / 'inductor'}",
            f"PYTHONPATH={os.pathsep.join(sys.path)}",  # what is imported there is what is imported here
            *(sys.executable, "-P", "-m", _CHILD, scratch),
        ]
        code, said = in_background(command, _LIMIT_S)
        library = Path(scratch, LIBRARY)
        if code or not is_whole(library):
            last = "\n".join(said.strip().splitlines()[-5:])
            raise BuildError(f"the compiler of regions ended with {code}: {last}")
        os.replace(library, target)
