"""Every op's case, forward and backward: its graph is whole, makes a valid file, and its functions are its bodies."""

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
from onnxtrain.testing import CaseCheck, OpCase, case_graph, run_model
from tests.ops.test_every_op_is_whole import CASES


def graph_of(check: CaseCheck) -> ir.Model:
    """The case's graph, with the gradients of its first output where it has any."""
    model = case_graph(check.case, check.dtype)
    if lookup(check.case.domain, check.case.name).gradient is NOT_DIFFERENTIABLE or not check.case.differentiate:
        return model
    first = [index == 0 for index in range(len(model.graph.outputs))]
    return differentiate(model, check.wrt, first).model


def some_fast() -> Iterator[Any]:
    """Two cases of each op; the rest with the slow tests. The body of each is compared in test_every_op_is_whole.py."""
    earlier: Counter[tuple[str, str]] = Counter()
    for case in CASES:
        earlier[case.domain, case.name] += 1
        is_slow = earlier[case.domain, case.name] > 2
        yield pytest.param(case, id=str(case), marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize("case", some_fast())
def test_makes_a_valid_file_that_computes_the_body(case: OpCase, tmp_path: Path) -> None:
    check = CaseCheck(case, torch.float32)
    model = graph_of(check)
    verify(model, lookup)
    in_file = onnx_file.file_model(model)
    onnx_file.write_file_model(in_file, tmp_path / "case.onnx")
    if case.domain and check.has_body:
        computes_the_body(check, model, in_file)


def computes_the_body(check: CaseCheck, model: ir.Model, in_file: ir.Model) -> None:
    known = next(iter(check.case.size_sets()))
    tensors = check.tensors(known)
    generator = torch.Generator().manual_seed(5)
    for value in model.graph.inputs[len(tensors) :]:
        shape = [sizes.evaluate(size, known) for size in sizes.dims_of(value)]
        tensors.append(torch.randn(shape, generator=generator).to(TORCH_DTYPES[value.dtype]))
    expected = run_model(inline_bodies(model), tensors)
    if any(node.domain not in ("", OWN) for node in model.graph):
        # onnxruntime has kernels of its own for names of com.microsoft, and takes them.
        InlinePass()(in_file)
    for got, wanted in zip(run_model(in_file, tensors), expected, strict=True):
        # Fusions of onnxruntime's, which differ between the two, add in another order.
        largest = wanted.abs().nan_to_num(0, 0, 0).max().item() if wanted.numel() and wanted.is_floating_point() else 0
        atol = max(1e-6, 8 * torch.finfo(torch.float32).eps * largest)
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-5, atol=atol)
