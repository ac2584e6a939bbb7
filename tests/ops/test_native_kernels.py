"""Stock onnxruntime's kernels of the ops that have one (`has_stock_kernel`) compute the same as PyTorch."""

import onnx_ir as ir
import pytest
import torch

from onnxtrain.graph.values import ONNX
from onnxtrain.ops.interfaces.stock_kernels import has_stock_kernel
from tests.op_case import CaseCheck, OpCase, run_model
from tests.ops.cases_onnx_models import CASES


def runs_natively(model: ir.Model, name: str) -> bool:
    nodes = [node for node in model.graph if node.op_type == name and node.domain == ONNX]
    return bool(nodes) and all(map(has_stock_kernel, nodes))


@pytest.mark.parametrize("case", [c for c in CASES if c.domain == ONNX], ids=str)
def test_native_kernel_computes_the_same(case: OpCase) -> None:
    check = CaseCheck(case, torch.float32)
    if not runs_natively(check.model, case.name):
        pytest.skip("onnxruntime runs the body")
    for sizes in case.size_sets():
        tensors = check.tensors(sizes)
        try:
            eager = check.reference(tensors, sizes, torch.float32)
            exact = check.reference(tensors, sizes, torch.float64)
        except (RuntimeError, IndexError, ValueError):
            continue
        got = run_model(check.model, tensors)
        check._compare(f"{case} {dict(sizes)} native", got, eager.outputs, exact.outputs)
