"""Every op's case, forward and backward: the graph passes the verifier and a valid file computes as PyTorch does."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import InlinePass

from onnxtrain import onnx_file
from onnxtrain.autodiff import differentiate
from onnxtrain.graph.values import OWN
from onnxtrain.graph.verify import verify
from onnxtrain.ops import NOT_DIFFERENTIABLE, lookup
from tests.op_case import CaseCheck, OpCase, case_graph
from tests.ops.test_every_op_is_whole import CASES
from tests.thinned import slow_after


def graph_of(check: CaseCheck) -> ir.Model:
    """Return the case's graph, with the gradients of its first output if it is differentiable."""
    model = case_graph(check.case, check.dtype)
    if lookup(check.case.domain, check.case.name).gradient is NOT_DIFFERENTIABLE or not check.case.differentiate:
        return model
    first = [index == 0 for index in range(len(model.graph.outputs))]
    return differentiate(model, check.wrt, first).model


def standard_model(model: ir.Model) -> ir.Model:
    """Return the file's model, for onnxruntime to run."""
    file_model = onnx_file.file_model(model)
    if any(node.domain not in ("", OWN) for node in model.graph):
        # onnxruntime would run its own kernels of the com.microsoft ops instead of the functions.
        InlinePass()(file_model)
    return file_model


# One of each op: test_every_op_is_whole.py compares the bodies of the others.
@pytest.mark.parametrize("case", slow_after(1, CASES, OpCase.op), ids=str)
def test_file_is_valid_and_computes_as_pytorch_does(case: OpCase, tmp_path: Path) -> None:
    check = CaseCheck(case, torch.float32, standard=standard_model)
    model = graph_of(check)
    verify(model, lookup)
    onnx_file.write_file_model(onnx_file.file_model(model), tmp_path / "case.onnx")
    if case.domain and check.has_body:
        assert check.check_body(next(iter(case.size_sets())))
