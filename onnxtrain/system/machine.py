"""The properties of the machine that kernel choice, planning and compiled code depend on, as one value."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from onnxtrain.torch_compat import aten_kernels

# The instruction sets that matter, by their names in Linux and PyTorch.
_INSTRUCTIONS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "neon": "neon",
    "bf16": "bf16",
    "arm_bf16": "bf16",
}
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Rates:
    """The throughput of one thread of a processor, for cost models.

    Attributes:
        gflops: float32 GEMM throughput in GFLOP/s, by library.
        overheads: seconds per GEMM call before the first multiplication, by library.
        narrow: GEMM throughput in bfloat16 and float16 relative to float32; below 1 without instructions for the dtype.
        bandwidth: bytes per second read from or written to main memory.
        conversions: elements per second converted between a narrow dtype and float32.
    """

    gflops: Mapping[str, float]
    overheads: Mapping[str, float]
    narrow: Mapping[torch.dtype, float]
    bandwidth: float = 6e9
    conversions: float = 5e9


@dataclass(frozen=True)
class Machine:
    """A machine as kernel choice, planning and compiled code see it.

    Attributes:
        processor: the model name, with family and stepping.
        vendor: "intel", "amd" or "".
        architecture: such as "x86_64" or "aarch64".
        system: `sys.platform`.
        code_target: equal for processors that run the same compiled code.
        instructions: the instruction sets of the processor, such as "avx512_bf16".
        onednn_instructions: those that oneDNN uses; ONEDNN_MAX_CPU_ISA limits them.
        onednn_bfloat16: whether oneDNN computes LSTMs and convolutions in bfloat16.
        vectors: the vector instructions of PyTorch's own kernels, such as "avx2"; ATEN_CPU_CAPABILITY limits them.
        threads: the number of threads that PyTorch's kernels use.
        compilers: the commands of the C++ compilers on this machine, the preferred one first.
        rates: the throughput of its kernels.
    """

    processor: str
    vendor: str
    architecture: str
    system: str
    code_target: str
    instructions: frozenset[str]
    onednn_instructions: frozenset[str]
    onednn_bfloat16: bool
    vectors: str
    threads: int
    compilers: tuple[tuple[str, ...], ...]
    rates: Rates

    @property
    def can_compile(self) -> bool:
        """Whether kernels can be compiled: they run on PyTorch's threads, which they can reach on Linux only."""
        return self.system.startswith("linux") and bool(self.compilers)


def current_machine() -> Machine:
    """Return the machine that this process runs on, with the current number of threads."""
    return _machine(torch.get_num_threads())


@functools.cache
def _machine(threads: int) -> Machine:
    cpuinfo = _cpuinfo(Path("/proc/cpuinfo"))
    processor, vendor = _processor(cpuinfo)
    instructions = _instructions(cpuinfo)
    onednn = instructions & _allowed_by_onednn(os.environ)
    return Machine(
        processor=processor,
        vendor=vendor,
        architecture=platform.machine(),
        system=sys.platform,
        code_target=_code_target(cpuinfo),
        instructions=instructions,
        onednn_instructions=onednn,
        onednn_bfloat16=_onednn_bfloat16(),
        vectors=torch.backends.cpu.get_cpu_capability().lower(),
        threads=threads,
        compilers=_compilers(os.environ),
        rates=rates(vendor, instructions, onednn),
    )


def _cpuinfo(file: Path) -> Mapping[str, str]:
    """Return the entries of the last core in /proc/cpuinfo; empty outside Linux."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _processor(cpuinfo: Mapping[str, str]) -> tuple[str, str]:
    """Return the processor's name and vendor; outside Linux, the name that Python gives it."""
    # Different models share a name and differ in family and stepping.
    numbers = "/".join(cpuinfo[key] for key in ("cpu family", "model", "stepping") if key in cpuinfo)
    model = f"{cpuinfo.get('model name', platform.processor() or platform.machine())} {numbers}".strip()
    vendor_text = f"{cpuinfo.get('vendor_id', '')} {model}".lower()
    return model, next((vendor for vendor in ("intel", "amd") if vendor in vendor_text), "")


def _code_target(cpuinfo: Mapping[str, str]) -> str:
    """Return the properties that -march=native depends on."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join([platform.machine(), *(cpuinfo.get(key, "") for key in keys)])


def _instructions(cpuinfo: Mapping[str, str]) -> frozenset[str]:
    """Return the instruction sets by Linux, and by PyTorch, which reports them on every system since 2.13."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    flags = cpuinfo.get("flags", cpuinfo.get("Features", "")).split()
    names = {*flags, *(name for name, is_present in capabilities.items() if is_present is True)}
    return frozenset(_INSTRUCTIONS[name] for name in names if name in _INSTRUCTIONS)


# https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html: each level includes those before it.
_LEVELS: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"SSE41", "AVX"}), frozenset()),
    (frozenset({"AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}), frozenset({"avx2"})),
    (frozenset({"AVX512_CORE", "AVX512_CORE_VNNI"}), frozenset({"avx512"})),
    (frozenset({"AVX512_CORE_BF16"}), frozenset({"avx512_bf16"})),
    (frozenset({"AVX512_CORE_FP16", "AVX10_1_512", "AVX10_2_512"}), frozenset({"avx512_fp16"})),
    (frozenset({"AVX512_CORE_AMX", "AVX10_1_512_AMX"}), frozenset({"amx_bf16"})),
)


def _allowed_by_onednn(environment: Mapping[str, str]) -> frozenset[str]:
    """Return the instruction sets that oneDNN may use; all of them if its variable names no level."""
    level = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).upper()
    allowed: frozenset[str] = frozenset()
    for names, instructions in _LEVELS:
        allowed |= instructions
        if level in names:
            return allowed
    return frozenset(_INSTRUCTIONS.values())


def _onednn_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and aten_kernels.onednn_has_bfloat16()


def _compilers(environment: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Return the compiler in $CXX, else those on the path."""
    cxx = environment.get("CXX")
    commands = [tuple(shlex.split(name)) for name in ((cxx,) if cxx else _COMPILERS)]
    return tuple(command for command in commands if command and shutil.which(command[0]))


# GFLOP/s per thread, float32: the GEMMs of a MiniLM step on two threads of an Intel Xeon (Emerald Rapids, 2.8 GHz), an
# AMD EPYC (Zen 5) and an AMD EPYC (Zen 3). On other processors PyTorch's kernels are used until others are measured.
_GFLOPS = {
    ("intel", "avx512"): {"aten": 165.0, "onednn": 150.0, "onednn transposed": 95.0, "convolution": 140.0},
    ("amd", "avx512"): {"aten": 107.0, "onednn": 240.0, "onednn transposed": 180.0, "convolution": 222.0},
    ("amd", "avx2"): {"aten": 68.0, "onednn": 66.0, "onednn transposed": 47.0},
}
_OTHER_GFLOPS = {"aten": 60.0, "onednn": 40.0, "onednn transposed": 30.0, "convolution": 30.0}
_OVERHEADS = {"aten": 3e-6, "onednn": 18e-6, "onednn transposed": 23e-6, "convolution": 20e-6}  # of 16 × 32 × 32


def rates(vendor: str, instructions: Collection[str], onednn_instructions: Collection[str]) -> Rates:
    """Return the measured rates of a kind of processor.

    AMX tiles do 16 times as many multiplications as AVX-512, and no GEMM reaches half of that. Without instructions for
    a narrow dtype, oneDNN converts each element to float32 as it reads it: 62 against 330 GFLOP/s on an Intel Xeon at
    2.8 GHz.
    """
    unlimited = _GFLOPS.get((vendor, _widest(instructions)), _OTHER_GFLOPS)
    is_limited = _widest(instructions) != _widest(onednn_instructions)
    onednn = _GFLOPS.get((vendor, _widest(onednn_instructions)), _OTHER_GFLOPS) if is_limited else unlimited
    none, vector, tiles = 0.19, 1.8, 6.0
    available = frozenset(onednn_instructions)
    narrow = {
        torch.bfloat16: tiles if "amx_bf16" in available else vector if available & {"avx512_bf16", "bf16"} else none,
        torch.float16: tiles if "amx_fp16" in available else vector if "avx512_fp16" in available else none,
    }
    return Rates({**_OTHER_GFLOPS, **onednn, "aten": unlimited["aten"]}, _OVERHEADS, narrow)


def _widest(instructions: Collection[str]) -> str:
    return next((name for name in ("avx512", "avx2") if name in instructions), "")
