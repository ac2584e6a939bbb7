"""The machine's C++ compiler and its flags."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onnxtrain.system.machine import current_machine

# No -ffast-math, which would break infinities and NaN. Without errno and traps the compiler vectorizes more loops.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pipe", "-w")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the program and its first arguments.
        version: the output of --version.
    """

    command: tuple[str, ...]
    version: str

    def call(self, flags: Sequence[str], source: Path, target: Path) -> list[str]:
        return [*self.command, *flags, "-x", "c++", str(source), "-o", str(target)]


def flags(*, torch_headers: bool = False) -> Sequence[str]:
    """Return the flags for all sources; with `torch_headers`, also those for the headers of this PyTorch and Python."""
    x86 = current_machine().architecture in ("x86_64", "AMD64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native", *(_for_torch() if torch_headers else ()))


def _for_torch() -> Sequence[str]:
    folder = Path(torch.__file__).parent
    includes = (folder / "include", folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    return (
        *(f"-I{include}" for include in includes),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DCOMPILED_FOR="{torch.__version__} {sys.version}"',  # another version gets another cache key
        f"-L{folder / 'lib'}",
        "-Wl,--no-as-needed",  # the libraries are listed before the source that needs them
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    )


def has_torch_headers() -> bool:
    """Return whether the headers of PyTorch and of Python (often a separate package, python3-dev) are installed."""
    python_header = Path(sysconfig.get_path("include"), "Python.h")
    return python_header.exists() and (Path(torch.__file__).parent / "include/torch").exists()


def find() -> Compiler | None:
    """Return the first of the machine's compilers that runs; None if none does.

    Starts a process, which takes some milliseconds.
    """
    for command in current_machine().compilers:
        try:
            result = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if result.returncode == 0:
            return Compiler(command, result.stdout)
    return None
