"""Walks the registry: every definition against PyTorch autograd, against its own body, and its axes by gathering.

Cases stand beside each family's tests, in `tests/ops/cases_<family>.py`.
"""

import functools
import importlib
import itertools
import pathlib

import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.graph.values import ATEN, MICROSOFT, OWN
from onnxtrain.ops import OPS, definition_of, lookup
from onnxtrain.ops.definition import Kernel
from onnxtrain.testing import CaseCheck, OpCase

CASES: list[OpCase] = [
    case
    for path in sorted(pathlib.Path(__file__).parent.glob("cases_*.py"))
    for case in importlib.import_module(f"tests.ops.{path.stem}").CASES
]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_autograd(case: OpCase, dtype: torch.dtype) -> None:
    check = CaseCheck(case, dtype)
    ran = [check.check_sizes(known) for known in case.size_sets()]
    assert ran[0], "PyTorch refuses the first set of sizes: the case tests nothing"
    if case.specials:
        check.check_sizes(next(iter(case.size_sets())), special=True)


CHOICES = [case for case in CASES if sum(bool(k.name) for k in lookup(case.domain, case.name).kernels) > 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHOICES, ids=str)
def test_every_candidate_matches_autograd(case: OpCase, dtype: torch.dtype) -> None:
    """Not only the kernel that is chosen: another machine chooses another."""
    ran: set[str] = set()

    def candidates(node: ir.Node, device: str) -> tuple[Kernel, ...]:
        return definition_of(node).candidates(node, device)

    def named(name: str, node: ir.Node, device: str) -> Kernel:
        return next((k for k in candidates(node, device) if k.name == name), expected_kernel(node, device))

    for name in sorted({k.name for k in lookup(case.domain, case.name).kernels}):
        check = CaseCheck(case, dtype, functools.partial(named, name))
        letters = case.letters()
        sixteens = [] if case.sizes else [dict(zip(letters, itertools.cycle((16, 32, 48)), strict=False))]
        ran |= {name for known in [*case.size_sets(), *sixteens] if check.check_sizes(known)}
    assert "aten" in ran


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_its_body(case: OpCase, dtype: torch.dtype) -> None:
    check = CaseCheck(case, dtype)
    if not check.has_body:
        pytest.skip("no body to compare")
    ran = [check.check_body(known) for known in case.size_sets()]
    assert ran[0], "PyTorch refuses the first set of sizes: the case tests nothing"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_axes_tell_the_truth(case: OpCase) -> None:
    CaseCheck(case, torch.float64).check_axes()


@pytest.mark.parametrize("case", [case for case in CASES if lookup(case.domain, case.name).moves], ids=str)
def test_moves_tell_the_truth(case: OpCase) -> None:
    CaseCheck(case, torch.float64).check_moves()


@pytest.mark.parametrize("case", [case for case in CASES if lookup(case.domain, case.name).factor], ids=str)
def test_factors_tell_the_truth(case: OpCase) -> None:
    CaseCheck(case, torch.float32).check_factor()


def test_every_op_has_a_case() -> None:
    tested = {(case.domain, case.name) for case in CASES}
    tested |= {(ATEN, "ATen"), (ATEN, "ATenGrad")}  # any operator in any arguments: tests/ops/test_aten.py
    tested |= {(MICROSOFT, "PythonOp"), (MICROSOFT, "PythonOpGrad")}  # any Python: tests/capture/test_python_op.py
    tested |= {(OWN, "Foreign")}  # any op that is not known: tests/device/test_artifacts_imports.py
    missing = sorted(f"{domain or 'ai.onnx'}::{name}" for domain, name in OPS if (domain, name) not in tested)
    assert not missing, f"no case in tests/ops for {', '.join(missing)}"
