"""Run the compiled kernels in cases of ops, whatever kernel this machine would choose."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.native_kernels import NOTE
from tests import op_case
from tests.op_case import OpCase


def compiled(node: ir.Node, device: str) -> Kernel:
    """Return the compiled kernel of the node, or the first candidate if there is none."""
    candidates = definition_of(node).candidates(node, device)
    return next((kernel for kernel in candidates if kernel.name == "compiled"), candidates[0])


def let_cases_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow compiled C++ kernels for the nodes of all cases."""
    original = op_case.case_graph

    def with_native_kernels(case: OpCase, dtype: torch.dtype) -> Any:
        model = original(case, dtype)
        for node in model.graph:
            node.metadata_props[NOTE] = "on"
        return model

    monkeypatch.setattr(op_case, "case_graph", with_native_kernels)
