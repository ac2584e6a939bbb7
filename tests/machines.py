"""Machines for which kernel choice is tested, whatever machine runs the tests.

`pytest --machine NAME` runs any test as on one of them, as far as choice goes. Kernels still run on the processor that
is there, so instructions that it lacks are taken away: `limited`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from onnxtrain.system import machine
from onnxtrain.system.machine import Machine, rates

Describe = Callable[..., Machine]  # the fixture `described_machine`

REAL = machine._machine  # of the machine that runs the tests, by its number of threads
GCC = (("c++",), ("g++",))
CLANG = (("clang++",),)


def described(processor: str, vendor: str, *instructions: str, onednn: str | None = None, **facts: object) -> Machine:
    """A Linux machine with two threads and a compiler, unless `facts` say otherwise.

    Args:
        processor: its name.
        vendor: "intel", "amd" or "".
        instructions: its instruction sets.
        onednn: the one that ONEDNN_MAX_CPU_ISA names, the last of `instructions` that oneDNN uses; None for no limit.
        facts: other fields of `Machine`.
    """
    used = instructions if onednn is None else instructions[: instructions.index(onednn) + 1]
    arm = "neon" in instructions
    vectors = next((name for name in ("avx512", "avx2") if name in instructions), "default")
    machine = Machine(
        processor=processor,
        vendor=vendor,
        architecture="aarch64" if arm else "x86_64",
        system="linux",
        code_target=processor,
        instructions=frozenset(instructions),
        onednn_instructions=frozenset(used),
        onednn_bfloat16="avx512" in used or "bf16" in used,
        vectors=vectors,
        threads=2,
        compilers=GCC,
        rates=rates(vendor, instructions, used),
    )
    return dataclasses.replace(machine, **facts)  # type: ignore[arg-type]


_AVX512 = ("avx2", "avx512")
_BF16 = (*_AVX512, "avx512_bf16")
_AMX = (*_BF16, "avx512_fp16", "amx_bf16")

MACHINES: Mapping[str, Machine] = {
    "avx2": described("AMD EPYC (Zen 3)", "amd", "avx2"),
    "avx2-intel": described("Intel Core (Comet Lake)", "intel", "avx2"),
    "avx512": described("Intel Xeon (Cascade Lake)", "intel", *_AVX512),
    "avx512-bf16": described("AMD EPYC (Zen 5)", "amd", *_BF16),
    "amx": described("Intel Xeon (Emerald Rapids)", "intel", *_AMX),
    "amx-limited": described("Intel Xeon, ONEDNN_MAX_CPU_ISA=AVX2", "intel", *_AMX, onednn="avx2"),
    "neon": described("ARM Neoverse N1", "", "neon"),
    "neon-bf16": described("ARM Neoverse V1", "", "neon", "bf16"),
    "apple": described("Apple M2", "", "neon", "bf16", architecture="arm64", system="darwin", compilers=CLANG),
    "windows": described("AMD Ryzen (Zen 3)", "amd", "avx2", architecture="AMD64", system="win32", compilers=()),
    "old": described("Intel Xeon (Ivy Bridge)", "intel"),
    "one-core": described("AMD EPYC (Zen 3), one core", "amd", "avx2", threads=1),
    "many-cores": described("AMD EPYC (Zen 5), 96 cores", "amd", *_BF16, threads=96),
    "no-compiler": described("Intel Xeon, no compiler", "intel", *_AMX, compilers=()),
}


def limited(wish: Machine, real: Machine) -> Machine:
    """The wished machine without what the real one lacks: its choices can run there."""
    instructions = wish.instructions & real.instructions
    onednn = wish.onednn_instructions & real.onednn_instructions
    return dataclasses.replace(
        wish,
        architecture=real.architecture,
        code_target=real.code_target,
        instructions=instructions,
        onednn_instructions=onednn,
        onednn_bfloat16=wish.onednn_bfloat16 and real.onednn_bfloat16,
        compilers=real.compilers if wish.compilers else (),
        rates=rates(wish.vendor, instructions, onednn),
    )


def replace_current(wish: Machine, set_attribute: Callable[[object, str, object], None] = setattr) -> None:
    """Make `current_machine` return `wish`."""
    set_attribute(machine, "_machine", lambda threads: wish)
