"""All definitions: kernel and gradient against PyTorch autograd and against the body; axis maps by gathering.

The cases of each family are in `tests/ops/cases_<family>.py`.
"""

import functools
import importlib
import itertools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.graph.values import ATEN, MICROSOFT, OWN
from onnxtrain.ops import OPS, definition_of, lookup
from onnxtrain.ops.definition import Kernel
from tests.device_under_test import device
from tests.op_case import CaseCheck, OpCase
from tests.thinned import covering, slow_after

CASES: list[OpCase] = [
    case
    for path in sorted(pathlib.Path(__file__).parent.glob("cases_*.py"))
    for case in importlib.import_module(f"tests.ops.{path.stem}").CASES
]


# Ops whose body differs from PyTorch at infinities and NaN, and the reason.
_ELU = "the gradient at NaN: NaN in the body, that of the positive branch in PyTorch"
_SIGN = "the gradient at NaN: the cotangent or its negative in the body, NaN in PyTorch"
_STATISTICS = "NaN and infinities: statistics of infinities differ between the body and PyTorch's kernel"
DIFFERENT_AT_SPECIALS = {
    "onnx-Elu": _ELU,
    "onnx-Selu": _ELU,
    "onnx-Celu": _ELU,
    "onnxtrain-Celu": _ELU,
    "onnxtrain-SmoothL1Loss": _SIGN,
    "onnxtrain-HuberLoss": _SIGN,
    "onnxtrain-BinaryCrossEntropyWithLogits": "the gradient at infinity: NaN in the body, -inf in PyTorch",
    "com.microsoft-BatchNormInternal": _STATISTICS,
    "onnxtrain-GroupNormalization": _STATISTICS,
}


# Ops that a graph for a GPU does not contain: their random bits are the CPU's, and cuDNN computes recurrent layers.
OF_A_CPU = re.compile(
    r"DropoutKey|Keyed|ReluDropout|MemoryEfficientAttention|Varlen(?!Flash)|LSTMLayer|GRULayer|RNNLayer"
)
KEYED_ON_A_CPU = re.compile(r"FlashAttention.*dropout", re.IGNORECASE)


def skip_on_gpu(case: OpCase) -> None:
    if device().type == "cpu":
        return
    if OF_A_CPU.match(case.name):
        pytest.skip("graphs for a GPU do not contain this op")
    if KEYED_ON_A_CPU.search(str(case)):
        pytest.skip("the case has the key of a CPU's dropout; tests/ops/test_gpu_attention.py compares that of a GPU")


def assert_matches_autograd(check: CaseCheck, size_sets: Sequence[Mapping[str, int]]) -> None:
    ran = [check.check_sizes(sizes) for sizes in size_sets]
    assert ran[0], "PyTorch rejects the first set of sizes: the case tests nothing"
    # On a GPU cuDNN computes eager's batch norms, with other statistics of infinities.
    if check.case.specials and not (device().type == "cuda" and "BatchNorm" in check.case.name):
        check.check_sizes(size_sets[0], special=True)


def assert_matches_body(check: CaseCheck, size_sets: Sequence[Mapping[str, int]]) -> None:
    if not check.has_body or device().type != "cpu":  # stock onnxruntime computes on the CPU
        return
    ran = [check.check_body(sizes) for sizes in size_sets]
    assert ran[0], "PyTorch rejects the first set of sizes: the case tests nothing"
    name = f"{check.case.domain or 'onnx'}-{check.case.name}"
    if check.case.specials and name not in DIFFERENT_AT_SPECIALS:
        check.check_body(size_sets[0], special=True)


# Of these ops, faults of tests/faults name cases.
WITH_FAULTS = (
    *("BatchNormInternal", "CumProdGrad", "EmbeddingGrad", "Expm1", "FlashAttentionDropout", "FloorDivide"),
    *("LayerNormalizationGrad", "LogSoftmaxGrad_13", "Max", "MaxDim", "Pow", "ReduceL2", "ReduceMax", "ReduceStd"),
    *("ReduceVar", "Remainder", "SafeSoftmax", "ScatterElements", "ScatterND", "SoftmaxCrossEntropyLossInternal"),
)


def in_both_types() -> list[Any]:
    """All cases; those beyond the third of an op in float32, and beyond the first in float64, are slow."""
    narrow, wide = (
        [pytest.param(c, dtype, id=f"{c}-{dtype}") for c in CASES] for dtype in (torch.float32, torch.float64)
    )

    def op(parameters: Any) -> Any:
        return parameters.values[0].op()

    def op_or_case(parameters: Any) -> Any:
        case = parameters.values[0]
        return str(case) if case.name in WITH_FAULTS else case.op()

    return [*slow_after(3, narrow, op_or_case), *slow_after(1, wide, op)]


@pytest.mark.parametrize(("case", "dtype"), in_both_types())
def test_is_whole(case: OpCase, dtype: torch.dtype) -> None:
    """In float32 at all sets of sizes, in float64 at the first: no definition depends on both."""
    skip_on_gpu(case)
    check, size_sets = CaseCheck(case, dtype), list(case.size_sets())
    properties: dict[str, Callable[[], object]]
    if dtype == torch.float32:
        properties = {
            "matches autograd": lambda: assert_matches_autograd(check, size_sets),
            "matches its body": lambda: assert_matches_body(check, size_sets),
        }
    else:
        properties = {
            "matches autograd": lambda: assert_matches_autograd(check, size_sets[:1]),
            "matches its body": lambda: assert_matches_body(check, size_sets[:1] if case.bodies is True else size_sets),
            "scalar factors are right": check.check_factor,
            "axis map is right": check.check_axes,
            "moved inputs are right": check.check_moves,
        }
    failures = []
    for name, check_property in properties.items():
        try:
            check_property()
        except Exception as error:  # noqa: BLE001  # report all failures
            error.add_note(f"{case} in {dtype}: {name}")
            failures.append(error)
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(properties)} properties of {case}", failures)


CHOICES = [case for case in CASES if sum(bool(k.name) for k in lookup(case.domain, case.name).kernels) > 1]


@pytest.mark.parametrize(
    ("case", "dtype"), covering(slow_after(2, CHOICES, OpCase.op), [torch.float32, torch.bfloat16]), ids=str
)
def test_every_candidate_matches_autograd(case: OpCase, dtype: torch.dtype) -> None:
    """All candidates, not only the chosen one: another machine may choose another."""
    ran: set[str] = set()

    def candidates(node: ir.Node, device: str) -> tuple[Kernel, ...]:
        return definition_of(node).candidates(node, device)

    def kernel_named(name: str, node: ir.Node, device: str) -> Kernel:
        return next((k for k in candidates(node, device) if k.name == name), expected_kernel(node, device))

    skip_on_gpu(case)
    for name in sorted({k.name for k in lookup(case.domain, case.name).kernels}):
        check = CaseCheck(case, dtype, functools.partial(kernel_named, name))
        multiples_of_16 = [] if case.sizes else [dict(zip(case.letters(), itertools.cycle((16, 32, 48)), strict=False))]
        ran |= {name for sizes in [*case.size_sets(), *multiples_of_16] if check.check_sizes(sizes)}
    assert "aten" in ran


def test_every_op_has_a_case() -> None:
    tested = {(case.domain, case.name) for case in CASES}
    tested |= {(ATEN, "ATen"), (ATEN, "ATenGrad")}  # any operator with any arguments: tests/ops/test_aten.py
    tested |= {(MICROSOFT, op) for op in ("PythonOp", "PythonOpGrad")}  # any Python: tests/capture/python_functions/
    tested |= {(OWN, "Foreign")}  # any unknown op: tests/device/test_artifacts_imports.py
    missing = sorted(f"{domain or 'ai.onnx'}::{name}" for domain, name in OPS if (domain, name) not in tested)
    assert not missing, f"no case in tests/ops for {', '.join(missing)}"
