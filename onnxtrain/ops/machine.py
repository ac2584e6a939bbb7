"""What of this machine decides which of several kernels is expected to be fastest."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Shapes = tuple[tuple[int, ...], ...]  # of a node's inputs; () for an absent one


@dataclass(frozen=True)
class Machine:
    """The processor as cost models see it.

    Attributes:
        model: the processor's name, as it calls itself.
        kind: "intel" or "amd" and the widest vectors that PyTorch uses on it, as in "amd avx2"; of others these alone.
        narrow: how many times float32's speed its instructions reach on products of bfloat16 and of float16; below 1
            where they have none for it.
    """

    model: str
    kind: str
    narrow: Mapping[torch.dtype, float]


@functools.cache
def this_machine() -> Machine:
    model, vendor = _processor(Path("/proc/cpuinfo"))
    kind = f"{vendor} {torch.backends.cpu.get_cpu_capability().lower()}".strip()
    return Machine(model, kind, _narrow(_capabilities()))


def _processor(file: Path) -> tuple[str, str]:
    """The processor's name and vendor; outside Linux, what Python knows of it."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in pairs}
    # Models of one name differ in family and stepping.
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    model = f"{facts.get('model name', platform.processor() or platform.machine())} {numbers}".strip()
    maker = f"{facts.get('vendor_id', '')} {model}".lower()
    return model, next((vendor for vendor in ("intel", "amd") if vendor in maker), "")


def _capabilities() -> Mapping[str, Any]:
    """What PyTorch finds in the processor's feature flags; nothing where it does not say (before 2.13)."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    if ask is not None:
        return ask()  # type: ignore[no-any-return]
    return {
        "amx_bf16": torch.cpu._is_amx_tile_supported(),
        "avx512_bf16": torch.cpu._is_avx512_bf16_supported(),
        "amx_fp16": torch.cpu._is_amx_fp16_supported(),
    }


def _narrow(has: Mapping[str, Any]) -> Mapping[torch.dtype, float]:
    """Tile instructions do 16 times as many multiplications as AVX-512, and no product reaches half of that.

    Without instructions oneDNN widens each element as it reads it: 62 against 330 GFLOP/s, Intel Xeon, 2.8 GHz.
    """
    none, vector, tiles = 0.19, 1.8, 6.0
    return {
        torch.bfloat16: tiles if has.get("amx_bf16") else vector if has.get("avx512_bf16") else none,
        torch.float16: tiles if has.get("amx_fp16") else vector if has.get("avx512_fp16") else none,
    }


# GFLOP/s of one thread, float32: products of a MiniLM step on two, Intel Xeon (Emerald Rapids) 2.8 GHz, AMD EPYC
# (Zen 5) and AMD EPYC (Zen 3). Others stay with what PyTorch does until something is measured.
_SPEEDS = {
    "intel avx512": {"aten": 165.0, "onednn": 150.0, "onednn transposed": 95.0, "convolution": 140.0},
    "amd avx512": {"aten": 107.0, "onednn": 240.0, "onednn transposed": 180.0, "convolution": 222.0},
    "amd avx2": {"aten": 68.0, "onednn": 66.0, "onednn transposed": 47.0},
}
_OTHERS = {"aten": 60.0, "onednn": 40.0, "onednn transposed": 30.0}
# Seconds before the first multiplication, from products of 16 x 32 x 32.
_OVERHEADS = {"aten": 3e-6, "onednn": 18e-6, "onednn transposed": 23e-6, "convolution": 20e-6}
_WIDENED = 5e9  # elements a second and thread


def expected_seconds(way: str, flops: float, machine: Machine, dtype: torch.dtype = torch.float32) -> float:
    """What multiplications are expected to take in one of the `_SPEEDS`, in elements of this type."""
    speed = _SPEEDS.get(machine.kind, _OTHERS)[way] * machine.narrow.get(dtype, 1.0) * torch.get_num_threads()
    return _OVERHEADS[way] + flops / speed / 1e9


def widening_seconds(elements: int) -> float:
    """What it is expected to take to widen or to round so many elements."""
    return 2 * _OVERHEADS["aten"] + elements / _WIDENED / torch.get_num_threads()


_BYTES = 6e9  # a second and thread, read or written, where they do not fit into caches


def moving_seconds(count: int) -> float:
    """What it is expected to take to read or write so many bytes of tensors."""
    return _OVERHEADS["aten"] + count / _BYTES / torch.get_num_threads()
