"""Describe the machine of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

_PACKAGES = ("torch", "onnxtrain", "transformers", "onnx", "onnx-ir")


@dataclass(frozen=True)
class Machine:
    """Processor, GPU, threads and versions, which timings depend on."""

    processor: str
    processors: int
    threads: int
    system: str
    memory_gib: float
    load: float  # the load average of the last minute
    versions: tuple[tuple[str, str], ...]
    gpu: str = ""

    def lines(self) -> tuple[tuple[str, str], ...]:
        """Return the description as pairs of a name and a value."""
        return (
            ("processor", f"{self.processor}, {self.processors} usable, {self.threads} threads in PyTorch"),
            *([("GPU", self.gpu)] if self.gpu else []),
            ("memory", f"{self.memory_gib:.1f} GiB"),
            ("system", self.system),
            ("load before the run", f"{self.load:.2f}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions)),
        )


def describe_machine() -> Machine:
    """Describe the machine that this process runs on."""
    return Machine(
        processor=_processor(),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.machine()}",
        memory_gib=_memory_bytes() / 2**30,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan"),
        versions=(("Python", platform.python_version()), *_versions()),
        gpu=_gpu(),
    )


def measured_commit() -> str:
    """Return the commit of the checkout, with `+` if files have uncommitted changes; "" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu() -> str:
    """Return name and memory of the GPU, and the version of CUDA; "" without a GPU."""
    if not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def _memory_bytes() -> int:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _versions() -> list[tuple[str, str]]:
    versions = []
    for name in _PACKAGES:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
