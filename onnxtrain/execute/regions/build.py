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
_refused: dict[str, str] = {}  # what did not compile in this process


def build(request: Request, dump: Path | None = None) -> Path:
    """The library of a region, from the cache or by the other process. Called off the main thread: it takes minutes.

    Args:
        request: the region.
        dump: where its graph and its library are written too.

    Raises:
        BuildError: it cannot be compiled; the first time, that is logged.
    """
    if request.key in _refused:
        raise BuildError(_refused[request.key])
    try:
        return _built(request, dump)
    except OSError as error:
        reason = f"the folder of compiled regions cannot be used: {error}"
    except BuildError as error:
        reason = str(error)
    _refused[request.key] = reason
    _LOG.warning("A fused region is not there, its operators run one by one instead: %s", reason)
    raise BuildError(reason)


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
            f"TORCHINDUCTOR_CACHE_DIR={target.parent / 'inductor'}",
            *(sys.executable, "-m", _CHILD, scratch),
        ]
        code, said = in_background(command, _LIMIT_S)
        library = Path(scratch, LIBRARY)
        if code or not is_whole(library):
            last = "\n".join(said.strip().splitlines()[-5:])
            raise BuildError(f"the compiler of regions ended with {code}: {last}")
        os.replace(library, target)
