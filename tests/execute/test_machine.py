"""The decisions that follow from a machine's facts: which kernel is expected to be fastest, and which is compiled.

What is expected of a choice follows from the facts, and from no machine that runs the tests.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from onnxtrain import log
from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.native import compiler
from onnxtrain.native.build import BuildError, require_compiler
from onnxtrain.ops.attention import compiled_kernels as compiled_attention
from onnxtrain.ops.attention import flash
from onnxtrain.ops.cost_model import moving_seconds, widening_seconds
from onnxtrain.ops.recurrent import layer_kernels
from onnxtrain.ops.recurrent.cells import GRU, LSTM
from onnxtrain.system import machine as facts
from onnxtrain.system.machine import Machine, current_machine
from tests.machines import MACHINES, REAL, Describe, limited
from tests.op_case import CaseCheck, OpCase, Spec
from tests.ops.cases_convolution import conv, geometry

every_machine = pytest.mark.parametrize("name", MACHINES)

# By which facts a machine multiplies bfloat16 and float16 faster than float32.
NARROW = {torch.bfloat16: {"amx_bf16", "avx512_bf16", "bf16"}, torch.float16: {"amx_fp16", "avx512_fp16"}}


def has_avx512(machine: Machine) -> bool:
    return "avx512" in machine.onednn_instructions


def multiplies(machine: Machine, dtype: torch.dtype) -> bool:
    """Whether oneDNN has instructions for matmuls of the type."""
    return dtype == torch.float32 or bool(NARROW[dtype] & machine.onednn_instructions)


def prefers_onednn(machine: Machine) -> bool:
    """Measured: MKL uses no AVX-512 on AMD's processors."""
    return machine.vendor == "amd" and has_avx512(machine)


def seconds_of(case: OpCase, dtype: torch.dtype, *shapes: tuple[int, ...]) -> dict[str, float]:
    """The expected seconds of each candidate on the current machine."""
    check = CaseCheck(case, dtype)
    (node,) = check.model.graph
    view = check.definition.view(node)
    return {k.name: k.seconds(view, shapes, current_machine()) for k in check.definition.candidates(node, "cpu")}


def first(seconds: dict[str, float]) -> str:
    return min(seconds, key=seconds.__getitem__)


LINEAR = OpCase("onnxtrain", "Linear", (Spec("t k"), Spec("n k"), Spec("n")), torch.nn.functional.linear)
WEIGHT_GRADIENT = OpCase("com.microsoft", "FusedMatMul", (Spec("t n"), Spec("t k")), torch.mm, {"transA": 1})
CONVOLUTION = OpCase("", "Conv", (Spec("n 8 h w"), Spec("8 8 3 3")), conv(geometry(2)), geometry(2))


def linear_seconds(rows: int, side: int, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    return seconds_of(LINEAR, dtype, (rows, side), (side, side), (side,))


def weight_gradient_seconds(rows: int) -> dict[str, float]:
    return seconds_of(WEIGHT_GRADIENT, torch.float32, (rows, 384), (rows, 384))


# The cost model


@every_machine
def test_large_matmul(name: str, described_machine: Describe) -> None:
    machine = described_machine(name)
    assert first(linear_seconds(2048, 384)) == ("onednn" if prefers_onednn(machine) else "aten")


@every_machine
def test_small_matmul(name: str, described_machine: Describe) -> None:
    """0.5 MFLOP: below 4 to 8 the overhead decides."""
    described_machine(name, threads=2)
    assert first(linear_seconds(64, 64)) == "aten"


@every_machine
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_matmul(name: str, dtype: torch.dtype, described_machine: Describe) -> None:
    machine = described_machine(name)
    assert first(linear_seconds(2048, 384, dtype)) == ("aten" if multiplies(machine, dtype) else "float32")


@every_machine
def test_narrow_convolution(name: str, described_machine: Describe) -> None:
    machine = described_machine(name)
    fastest = first(seconds_of(CONVOLUTION, torch.bfloat16, (32, 8, 64, 64), (8, 8, 3, 3), ()))
    assert fastest == ("aten" if multiplies(machine, torch.bfloat16) else "float32")


@every_machine
def test_weight_gradient(name: str, described_machine: Describe) -> None:
    """A convolution takes 3.4 times as long as MKL on an EPYC without AVX-512, where it is not a candidate."""
    machine = described_machine(name)
    seconds = weight_gradient_seconds(2048)
    assert ("convolution" in seconds) == has_avx512(machine)
    assert first(seconds) == ("convolution" if prefers_onednn(machine) else "aten")


def test_weight_gradients_by_convolution_need_rows_in_sixteens(described_machine: Describe) -> None:
    described_machine("avx512-bf16")
    even, odd = (weight_gradient_seconds(rows)["convolution"] for rows in (2048, 2049))
    assert even < 1 < odd


def test_reduced_precision_and_switched_off_libraries_are_left_to_pytorch(described_machine: Describe) -> None:
    described_machine("avx512-bf16")
    assert linear_seconds(8, 8).keys() == {"aten", "large pages", "onednn"}
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=False):
        assert linear_seconds(8, 8).keys() == {"aten", "large pages"}
    torch.set_float32_matmul_precision("medium")
    try:
        assert linear_seconds(8, 8).keys() == {"aten", "large pages"}
    finally:
        torch.set_float32_matmul_precision("highest")


@every_machine
def test_chosen_kernel_of_a_graph(name: str, described_machine: Describe) -> None:
    """A dynamic size counts as moderately large: 1024 rows here."""
    machine = described_machine(name, threads=2)
    case = OpCase("onnxtrain", "Linear", (Spec("b l 512"), Spec("512 512"), Spec("512")), torch.nn.functional.linear)
    (node,) = CaseCheck(case, torch.float32).model.graph
    assert expected_kernel(node, "cpu").name == ("onednn" if prefers_onednn(machine) else "aten")


def test_more_threads_are_expected_to_take_less_time(described_machine: Describe) -> None:
    times = []
    for name in ("one-core", "avx2", "many-cores"):
        machine = described_machine(name)
        times.append(
            (linear_seconds(2048, 384)["aten"], moving_seconds(1 << 30, machine), widening_seconds(1 << 30, machine))
        )
    assert times == sorted(times, reverse=True)
    one, two, many = (row[1] for row in times)
    assert one / two == pytest.approx(2, rel=1e-2)
    assert two / many == pytest.approx(48, rel=1e-2)


# Compiled kernels


@every_machine
def test_attention_in_bfloat16_is_compiled_where_the_processor_has_no_instructions(
    name: str, described_machine: Describe
) -> None:
    machine = described_machine(name)
    assert (compiled_attention.library_for_dtype(torch.bfloat16) is None) == multiplies(machine, torch.bfloat16)
    assert compiled_attention.library_for_dtype(torch.float32) is not None


@every_machine
def test_compiled_attention_needs_heads_for_all_threads(name: str, described_machine: Describe) -> None:
    machine = described_machine(name)
    q = torch.empty(2, 4, 64, 32)
    assert flash._compiled_is_faster(q, q, q, None, True, None) == (machine.threads <= 16)


@every_machine
def test_compiler(
    name: str,
    described_machine: Describe,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = described_machine(name)
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="a compiler"))
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        if machine.can_compile:
            assert require_compiler("kernels") == compiler.Compiler(machine.compilers[0], "a compiler")
        else:
            for _ in range(2):
                with pytest.raises(BuildError, match="no C\\+\\+ compiler" if machine.system == "linux" else "Linux"):
                    require_compiler("kernels")
    is_missing = machine.system == "linux" and not machine.compilers
    assert len(caplog.records) == is_missing
    target = "-march=native" if machine.architecture in ("x86_64", "AMD64") else "-mcpu=native"
    assert target in compiler.flags()


@every_machine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lstm_by_onednn(name: str, dtype: torch.dtype, described_machine: Describe) -> None:
    machine = described_machine(name)
    x = torch.empty(2, 3, 4, dtype=dtype)
    expected = machine.onednn_bfloat16 if dtype == torch.bfloat16 else torch.backends.mkldnn.is_available()
    assert layer_kernels._onednn_runs(LSTM, x) == expected
    assert not layer_kernels._onednn_runs(GRU, x)


# The facts themselves

ALL = {"avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "neon", "bf16"}
LIMITS = {
    "ALL": ALL,
    "nothing that oneDNN knows": ALL,
    "SSE41": set(),
    "AVX2": {"avx2"},
    "avx2_vnni": {"avx2"},
    "AVX512_CORE": {"avx2", "avx512"},
    "AVX512_CORE_BF16": {"avx2", "avx512", "avx512_bf16"},
    "AVX512_CORE_AMX": {"avx2", "avx512", "avx512_bf16", "avx512_fp16", "amx_bf16"},
}


@pytest.mark.parametrize("level", LIMITS)
@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_levels_of_onednn(level: str, variable: str) -> None:
    assert facts._allowed_by_onednn({variable: level}) == LIMITS[level]


PRINT = """
from onnxtrain.system.machine import current_machine
machine = current_machine()
print(machine.vectors, int(machine.onednn_bfloat16), machine.threads, len(machine.compilers), len(machine.instructions))
print("instructions:", *sorted(machine.onednn_instructions))
"""


def read_with(**variables: str) -> tuple[list[str], list[str]]:
    """The facts that another process reads."""
    told = subprocess.run(
        [sys.executable, "-c", PRINT], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return told[0].split(), told[1].split()[1:]


@pytest.mark.everywhere
def test_limits_of_the_environment_are_facts() -> None:
    plain, own = read_with(OMP_NUM_THREADS="1")
    limited_by_all, instructions = read_with(
        ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", OMP_NUM_THREADS="1", CXX="/nowhere/c++"
    )
    assert limited_by_all == ["default", "0", "1", "0", plain[4]]
    assert instructions == []
    assert set(own) <= ALL


def test_facts_of_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    told = {"Features": "fp asimd sve bf16 i8mm", "CPU implementer": "0x41", "CPU part": "0xd40"}
    assert facts._instructions(told) == {"neon", "bf16"}
    assert facts._processor({**told, "model name": "Neoverse-V1"}) == ("Neoverse-V1", "")
    assert facts._code_target(told) != facts._code_target({**told, "CPU part": "0xd0c"})


def test_facts_without_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"neon": True, "avx2": False, "l2": 1}, raising=False)
    assert facts._instructions({}) == {"neon"}
    monkeypatch.setattr(facts.platform, "processor", lambda: "arm")
    assert facts._processor({}) == ("arm", "")


@pytest.mark.everywhere
def test_current_machine_has_the_present_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_machine", REAL)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert current_machine().threads == threads
    finally:
        torch.set_num_threads(before)


@every_machine
def test_a_limited_machine_has_nothing_that_this_one_lacks(name: str) -> None:
    real = REAL(1)
    machine = limited(MACHINES[name], real)
    assert machine.instructions <= real.instructions
    assert machine.onednn_instructions <= real.onednn_instructions
    assert machine.onednn_bfloat16 <= real.onednn_bfloat16
    assert machine.code_target == real.code_target
