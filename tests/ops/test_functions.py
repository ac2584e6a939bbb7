"""Every op's case, forward and backward: the graph passes the verifier and a valid file computes the same as bodies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import InlinePass

from onnxtrain import onnx_file
from onnxtrain.autodiff import differentiate
from onnxtrain.graph import sizes
from onnxtrain.graph.values import OWN
from onnxtrain.graph.verify import verify
from onnxtrain.ops import NOT_DIFFERENTIABLE, lookup
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.dtypes import TORCH_DTYPES
from tests.op_case import CaseCheck, OpCase, case_graph, run_model
from tests.ops.test_every_op_is_whole import CASES


def graph_of(check: CaseCheck) -> ir.Model:
    """Return the case's graph, with the gradients of its first output if it is differentiable."""
    model = case_graph(check.case, check.dtype)
    if lookup(check.case.domain, check.case.name).gradient is NOT_DIFFERENTIABLE or not check.case.differentiate:
        return model
    first = [index == 0 for index in range(len(model.graph.outputs))]
    return differentiate(model, check.wrt, first).model


def cases() -> Iterator[Any]:
    """Yield all cases, marked as slow but for two of each op: test_every_op_is_whole.py compares the other bodies."""
    counts: Counter[tuple[str, str]] = Counter()
    for case in CASES:
        counts[case.domain, case.name] += 1
        is_slow = counts[case.domain, case.name] > 2
        yield pytest.param(case, id=str(case), marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("case", cases())
def test_file_is_valid_and_computes_the_same_as_the_body(case: OpCase, tmp_path: Path) -> None:
    check = CaseCheck(case, torch.float32)
    model = graph_of(check)
    verify(model, lookup)
    file_model = onnx_file.file_model(model)
    onnx_file.write_file_model(file_model, tmp_path / "case.onnx")
    if case.domain and check.has_body:
        assert_computes_the_body(check, model, file_model)


def assert_computes_the_body(check: CaseCheck, model: ir.Model, file_model: ir.Model) -> None:
    size_values = next(iter(check.case.size_sets()))
    tensors = check.tensors(size_values)
    generator = torch.Generator().manual_seed(5)
    for value in model.graph.inputs[len(tensors) :]:
        shape = [sizes.evaluate(size, size_values) for size in sizes.dims_of(value)]
        tensors.append(torch.randn(shape, generator=generator).to(TORCH_DTYPES[value.dtype]))
    expected = run_model(inline_bodies(model), tensors)
    if any(node.domain not in ("", OWN) for node in model.graph):
        # onnxruntime would run its own kernels of the com.microsoft ops instead of the functions.
        InlinePass()(file_model)
    for got, body in zip(run_model(file_model, tensors), expected, strict=True):
        # onnxruntime fuses the two graphs differently, so sums are in different orders.
        largest = body.abs().nan_to_num(0, 0, 0).max().item() if body.numel() and body.is_floating_point() else 0
        atol = max(1e-6, 8 * torch.finfo(torch.float32).eps * largest)
        torch.testing.assert_close(got, body, equal_nan=True, rtol=1e-5, atol=atol)
