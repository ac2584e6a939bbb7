"""Finds onnxruntime's headers and library, and builds the program.

The library is that of the Python package onnxruntime, which has no headers. Debian's package libonnxruntime-dev has
them, from Debian 13 on. Where it is not installed, apt fetches it and it is unpacked into build/onnxruntime-headers:
nothing is installed. Headers of an older version go with a newer library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import onnxruntime

HERE = Path(__file__).parent
FETCHED = HERE.parents[1] / "build" / "onnxruntime-headers"
_HEADER = "onnxruntime_cxx_api.h"
_PACKAGE = "libonnxruntime-dev"
_SOURCE = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


class BuildError(RuntimeError):
    """The program cannot be built here; says what is missing."""


class MissingError(BuildError):
    """A tool or the headers are missing, and cannot be fetched."""


def build(folder: Path, kind: str = "Release") -> Path:
    """Build the program in the folder and return its path. The kind is one of CMake's build types.

    Raises:
        MissingError: something that it takes is missing.
        BuildError: the compiler failed.
    """
    if not all(map(shutil.which, ("cmake", "c++"))) or not Path("/usr/include/nlohmann/json.hpp").exists():
        raise MissingError(
            "CMake, a C++ compiler or a library is missing: apt-get install cmake g++ nlohmann-json3-dev"
        )
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"ONNXRUNTIME_INCLUDE": headers(), "ONNXRUNTIME_LIBRARY": library(folder)}
    definitions = [f"-D{name}={path}" for name, path in variables.items()]
    _run(["cmake", "-S", str(HERE), "-B", str(folder), f"-DCMAKE_BUILD_TYPE={kind}", *definitions])
    _run(["cmake", "--build", str(folder)])
    return folder / "train"


def library(folder: Path) -> Path:
    """Return a link to the Python package's library, under the name that the linker and the loader look for."""
    candidates = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not candidates:
        raise MissingError(
            f"onnxruntime {onnxruntime.__version__} keeps its library elsewhere: use 1.24 or later on Linux."
        )
    link = (folder / "libonnxruntime.so.1").resolve()
    link.unlink(missing_ok=True)
    link.symlink_to(candidates[0])
    return link


def headers() -> Path:
    """Return the folder of the headers; Debian's package is fetched where it is not installed."""
    for include in (Path("/usr/include/onnxruntime"), FETCHED):
        if (include / _HEADER).exists():
            return include
    todo = f"install {_PACKAGE} (Debian 13, Ubuntu 25.04), or give CMake -DONNXRUNTIME_INCLUDE= of your own"
    if shutil.which("apt-get") is None:
        raise MissingError(f"There is no {_HEADER}, and no apt-get to fetch it: {todo}.")
    FETCHED.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FETCHED.parent) as temporary:
        try:
            _fetch(Path(temporary))
        except BuildError as error:
            raise MissingError(f"There is no {_HEADER}, and apt-get cannot fetch it: {todo}.\n{error}") from error
        if not FETCHED.exists():  # else another process was faster
            os.replace(Path(temporary) / "unpacked/usr/include/onnxruntime", FETCHED)
    return FETCHED


def _fetch(folder: Path) -> None:
    """Unpack Debian 13's package into `folder`/unpacked, by apt with separate package lists."""
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "status").touch()
    (folder / "debian.sources").write_text(_SOURCE)
    settings = {
        "Dir::Etc::SourceList": folder / "debian.sources",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": folder,
        "Dir::State::Status": folder / "status",
        "Dir::Cache": folder / "cache",
    }
    options = [part for name, value in settings.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update"])
    _run(["apt-get", *options, "download", _PACKAGE], cwd=folder)
    (package,) = folder.glob("*.deb")
    _run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")])


def _run(command: list[str], cwd: Path | None = None) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if ran.returncode:
        raise BuildError(f"{' '.join(command)}\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}")
