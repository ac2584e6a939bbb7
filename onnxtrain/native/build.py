"""Compile a source once per machine, and cache the library on disk.

A file is an ELF library followed by its SHA-256 digest, which the linker ignores: a damaged file is detected before it
is mapped, when it could crash the process. Complete files are moved into place, so processes may build concurrently.
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

DIGEST_BYTES = 32
_TIMEOUT_S = 300  # for a compile at low priority on a busy machine


class BuildError(Exception):
    """A library could not be built; the message says why."""


def build(name: str, source: str, ticket: background.Ticket, *, torch_headers: bool = False) -> Path:
    """Return the compiled file, from the cache or newly compiled. Not for the main thread: it may take long.

    Args:
        name: the prefix of the file name.
        source: C++.
        ticket: the place in the queue of compilations.
        torch_headers: whether the source includes the headers of PyTorch and Python.

    Raises:
        BuildError: this is not Linux, the compiler or the headers are missing, the source does not compile, or the
            cache is not writable.
    """
    cxx = require_compiler("compiled kernels")
    if torch_headers and not compiler.has_torch_headers():
        raise BuildError("Python's headers are not installed (Debian and Ubuntu: apt install python3-dev)")
    flags = compiler.flags(torch_headers=torch_headers)
    parts = (source, " ".join((*cxx.command, *flags)), cxx.version, current_machine().code_target)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        folder = cache_folder("native")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = folder / f"{name}-{key}.so"
        if not is_intact(target):
            with ticket:
                _compile(cxx, flags, source, target)
    except OSError as error:
        raise BuildError(f"the cache folder of compiled kernels cannot be used: {error}") from error
    return target


def require_compiler(purpose: str) -> compiler.Compiler:
    """Return the machine's compiler. If it is missing, one warning says what to install.

    Args:
        purpose: the code that it compiles, for the error.

    Raises:
        BuildError: this is not Linux, or there is no compiler.
    """
    system = current_machine().system
    if not system.startswith("linux"):
        raise BuildError(f"{purpose} are for Linux, this is {system}")
    cxx = compiler.find()
    if cxx is None:
        variable = os.environ.get("CXX")
        searched = f"$CXX is {variable!r}, which does not run" if variable else "looked for c++, g++ and clang++"
        warn_once(
            f"There is no C++ compiler ({searched}): training runs without compiled kernels, which is slower. Install "
            "one (Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or set kernels='pytorch' "
            "(ONNXTRAIN_KERNELS=pytorch)."
        )
        raise BuildError(f"there is no C++ compiler ({searched})")
    return cxx


def is_intact(path: Path) -> bool:
    """Return whether this is a library whose digest is right, and which belongs to this user or root."""
    try:
        data = path.read_bytes()
        owner = path.stat().st_uid
    except OSError:
        return False
    return owner in (os.getuid(), 0) and hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _compile(cxx: compiler.Compiler, flags: Sequence[str], source: str, target: Path) -> None:
    with scratch_folder(target) as scratch:
        text, library = scratch / "source.cpp", scratch / "library.so"
        text.write_text(source, encoding="utf-8")
        status, output = background.run(cxx.call(flags, text, library), _TIMEOUT_S)
        if status:
            first_lines = "\n".join(output.splitlines()[:5])
            raise BuildError(f"{cxx.command[0]} ended with {status}: {first_lines}")
        append_digest(library)
        os.replace(library, target)


def append_digest(library: Path) -> None:
    """Append the digest that `is_intact` checks."""
    with open(library, "r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(digest)
