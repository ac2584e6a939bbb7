"""Which C++ compiler the machine has, and how it is called."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from onnxtrain.system.machine import current_machine

# No -ffast-math: infinities and NaN keep their meaning. Without errno and traps more loops become vectors.
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pipe", "-w")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the program and its first arguments.
        version: what it says of itself.
    """

    command: tuple[str, ...]
    version: str

    def call(self, flags: Sequence[str], source: Path, target: Path) -> list[str]:
        return [*self.command, *flags, "-x", "c++", str(source), "-o", str(target)]


def flags(*, torch_headers: bool = False) -> Sequence[str]:
    """How everything is compiled; with PyTorch's and Python's headers, for this version of each."""
    x86 = current_machine().architecture in ("x86_64", "AMD64")
    return (*_FLAGS, "-march=native" if x86 else "-mcpu=native", *(_for_torch() if torch_headers else ()))


def _for_torch() -> Sequence[str]:
    folder = Path(torch.__file__).parent
    includes = (folder / "include", folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    return (
        *(f"-I{include}" for include in includes),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DCOMPILED_FOR="{torch.__version__} {sys.version}"',  # another version in the same folder is another library
        f"-L{folder / 'lib'}",
        "-Wl,--no-as-needed",  # the libraries come before the source, which needs them
        *("-lc10", "-ltorch_cpu", "-ltorch_python"),
    )


def has_torch_headers() -> bool:
    """Whether Python's headers are there, which often come apart (python3-dev), and PyTorch's."""
    places = (sysconfig.get_path("include"), Path(torch.__file__).parent / "include/torch")
    return Path(places[0], "Python.h").exists() and Path(places[1]).exists()


def find() -> Compiler | None:
    """The first of the machine's compilers that runs; None where none does.

    It starts a process, which takes some milliseconds.
    """
    for command in current_machine().compilers:
        try:
            asked = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if asked.returncode == 0:
            return Compiler(command, asked.stdout)
    return None
