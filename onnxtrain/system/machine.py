"""The facts of the machine on which kernel choice, planning and compiled code rest: one value, read once."""

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

# Instruction sets that choices ask for, by the names that Linux and PyTorch give them.
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
    """What one thread of a processor does in a second, as cost models see it.

    Attributes:
        gflops: float32 multiplications and additions of a matmul, in 10⁹, by library.
        overheads: seconds before the first multiplication, by library.
        narrow: multiples of float32's rate for bfloat16 and float16; below 1 without instructions for the type.
        moved_bytes: bytes read or written, where they do not fit into caches.
        widened: elements converted between a narrow type and float32.
    """

    gflops: Mapping[str, float]
    overheads: Mapping[str, float]
    narrow: Mapping[torch.dtype, float]
    moved_bytes: float = 6e9
    widened: float = 5e9


@dataclass(frozen=True)
class Machine:
    """A machine as kernel choice, planning and compiled code see it.

    Attributes:
        processor: the model, as it names itself, with family and stepping.
        vendor: "intel", "amd" or "".
        architecture: as in "x86_64", "aarch64".
        system: as `sys.platform` names it.
        code_target: identifies the processors that run the same compiled code.
        instructions: the instruction sets of the processor, as in "avx512_bf16".
        onednn_instructions: those that oneDNN uses; ONEDNN_MAX_CPU_ISA limits them.
        onednn_bfloat16: whether oneDNN computes LSTMs and convolutions in bfloat16.
        vectors: the vectors of PyTorch's own kernels, as in "avx2"; ATEN_CPU_CAPABILITY limits them.
        threads: the threads that PyTorch's kernels use.
        compilers: commands of C++ compilers on this machine, the preferred one first.
        rates: the speed of its kernels.
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
    def compiles(self) -> bool:
        """Whether compiled kernels can exist: outside Linux, PyTorch's threads are out of their reach."""
        return self.system.startswith("linux") and bool(self.compilers)


def current_machine() -> Machine:
    """The machine that this process runs on, with the present number of threads."""
    return _machine(torch.get_num_threads())


@functools.cache
def _machine(threads: int) -> Machine:
    facts = _cpuinfo(Path("/proc/cpuinfo"))
    processor, vendor = _processor(facts)
    instructions = _instructions(facts)
    onednn = instructions & _allowed_by_onednn(os.environ)
    return Machine(
        processor=processor,
        vendor=vendor,
        architecture=platform.machine(),
        system=sys.platform,
        code_target=_code_target(facts),
        instructions=instructions,
        onednn_instructions=onednn,
        onednn_bfloat16=_onednn_bfloat16(),
        vectors=torch.backends.cpu.get_cpu_capability().lower(),
        threads=threads,
        compilers=_compilers(os.environ),
        rates=rates(vendor, instructions, onednn),
    )


def _cpuinfo(file: Path) -> Mapping[str, str]:
    """What Linux says of the last core; nothing elsewhere."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _processor(facts: Mapping[str, str]) -> tuple[str, str]:
    """The processor's name and vendor; outside Linux, as Python names it."""
    # Models of one name differ in family and stepping.
    numbers = "/".join(facts[key] for key in ("cpu family", "model", "stepping") if key in facts)
    model = f"{facts.get('model name', platform.processor() or platform.machine())} {numbers}".strip()
    maker = f"{facts.get('vendor_id', '')} {model}".lower()
    return model, next((vendor for vendor in ("intel", "amd") if vendor in maker), "")


def _code_target(facts: Mapping[str, str]) -> str:
    """What -march=native looks at."""
    keys = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join([platform.machine(), *(facts.get(key, "") for key in keys)])


def _instructions(facts: Mapping[str, str]) -> frozenset[str]:
    """By Linux; also by PyTorch, which names them on every system from 2.13 on."""
    ask = getattr(torch.cpu, "get_capabilities", dict)
    names = {*facts.get("flags", facts.get("Features", "")).split(), *(k for k, v in ask().items() if v is True)}
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
    """The instruction sets that oneDNN may use; all of them where its variable names no level."""
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
    """The compiler that $CXX names, else those on the path."""
    wish = environment.get("CXX")
    commands = [tuple(shlex.split(name)) for name in ((wish,) if wish else _COMPILERS)]
    return tuple(command for command in commands if command and shutil.which(command[0]))


# GFLOP/s of one thread, float32: matmuls of a MiniLM step on two, Intel Xeon (Emerald Rapids) 2.8 GHz, AMD EPYC
# (Zen 5) and AMD EPYC (Zen 3). Other processors stay with what PyTorch does until something is measured.
_GFLOPS = {
    ("intel", "avx512"): {"aten": 165.0, "onednn": 150.0, "onednn transposed": 95.0, "convolution": 140.0},
    ("amd", "avx512"): {"aten": 107.0, "onednn": 240.0, "onednn transposed": 180.0, "convolution": 222.0},
    ("amd", "avx2"): {"aten": 68.0, "onednn": 66.0, "onednn transposed": 47.0},
}
_OTHER_GFLOPS = {"aten": 60.0, "onednn": 40.0, "onednn transposed": 30.0, "convolution": 30.0}
_OVERHEADS = {"aten": 3e-6, "onednn": 18e-6, "onednn transposed": 23e-6, "convolution": 20e-6}  # of 16 × 32 × 32


def rates(vendor: str, instructions: Collection[str], onednn_instructions: Collection[str]) -> Rates:
    """The measured rates of a kind of processor.

    Tile instructions do 16 times as many multiplications as AVX-512, and no matmul reaches half of that. Without
    instructions for a narrow type, oneDNN widens each element as it reads it: 62 against 330 GFLOP/s, Intel Xeon,
    2.8 GHz.
    """
    own = _GFLOPS.get((vendor, _widest(instructions)), _OTHER_GFLOPS)
    limited = _widest(instructions) != _widest(onednn_instructions)
    onednn = _GFLOPS.get((vendor, _widest(onednn_instructions)), _OTHER_GFLOPS) if limited else own
    none, vector, tiles = 0.19, 1.8, 6.0
    has = frozenset(onednn_instructions)
    narrow = {
        torch.bfloat16: tiles if "amx_bf16" in has else vector if has & {"avx512_bf16", "bf16"} else none,
        torch.float16: tiles if "amx_fp16" in has else vector if "avx512_fp16" in has else none,
    }
    return Rates({**_OTHER_GFLOPS, **onednn, "aten": own["aten"]}, _OVERHEADS, narrow)


def _widest(instructions: Collection[str]) -> str:
    return next((name for name in ("avx512", "avx2") if name in instructions), "")
