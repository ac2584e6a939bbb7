"""Compiles a source once a machine, and keeps the library on disk.

A file is an ELF library with its SHA-256 behind it: a linker does not mind, and a damaged file is seen before it is
mapped, where it could end the process. It gets its name when it is whole, so that processes may build side by side.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from onnxtrain.log import warn_once
from onnxtrain.native import background, compiler
from onnxtrain.system.cache_folder import cache_folder, scratch_folder
from onnxtrain.system.machine import current_machine

_DIGEST_BYTES = 32
_LIMIT_S = 300  # for a compile at low priority on a busy machine


class BuildError(Exception):
    """Why there is no library."""


def build(name: str, source: str, turn: background.Turn, *, torch_headers: bool = False) -> Path:
    """The file of the compiled source, from the cache or by the compiler. Called off the main thread: it may take long.

    Args:
        name: what the file's name begins with.
        source: C++.
        turn: when a compiler may run.
        torch_headers: whether it includes PyTorch's headers and Python's.

    Raises:
        BuildError: this is not Linux, there is no compiler, there are no such headers, it refuses the source, or the
            cache cannot be written.
    """
    found = usable_compiler("compiled kernels")
    if torch_headers and not compiler.has_torch_headers():
        raise BuildError("Python's headers are not there (Debian and Ubuntu: apt install python3-dev)")
    flags = compiler.flags(torch_headers=torch_headers)
    parts = (source, " ".join((*found.command, *flags)), found.version, current_machine().code_target)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        folder = cache_folder("native")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder / f"{name}-{key}.so"
        if not is_whole(target):
            with turn:
                _compile(found, flags, source, target)
    except OSError as error:
        raise BuildError(f"the folder of compiled kernels cannot be used: {error}") from error
    return target


def usable_compiler(product: str) -> compiler.Compiler:
    """The machine's compiler. Where it is missing, a warning says once what to install.

    Args:
        product: what it is to compile, for the error.

    Raises:
        BuildError: this is not Linux, or there is no compiler.
    """
    system = current_machine().system
    if not system.startswith("linux"):
        raise BuildError(f"{product} are for Linux, this is {system}")
    found = compiler.find()
    if found is None:
        wish = os.environ.get("CXX")
        sought = f"$CXX is {wish!r}, which does not run" if wish else "looked for c++, g++ and clang++"
        warn_once(
            f"There is no C++ compiler ({sought}): training runs without compiled kernels, which is slower. Install "
            "one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set native=False "
            "(ONNXTRAIN_NATIVE=0)."
        )
        raise BuildError(f"there is no C++ compiler ({sought})")
    return found


def is_whole(path: Path) -> bool:
    """Whether this is a library as `seal` left it, and nobody else's."""
    try:
        data = path.read_bytes()
        owner = path.stat().st_uid
    except OSError:
        return False
    return owner in (os.getuid(), 0) and hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _compile(found: compiler.Compiler, flags: Sequence[str], source: str, target: Path) -> None:
    with scratch_folder(target) as scratch:
        text, library = scratch / "source.cpp", scratch / "library.so"
        text.write_text(source, encoding="utf-8")
        code, said = background.run(found.call(flags, text, library), _LIMIT_S)
        if code:
            first = "\n".join(said.splitlines()[:5])
            raise BuildError(f"{found.command[0]} ended with {code}: {first}")
        seal(library)
        os.replace(library, target)


def seal(library: Path) -> None:
    """Writes a library's digest behind it: `is_whole` asks for it."""
    with open(library, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
