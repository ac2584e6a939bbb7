"""Lets the candidates of our own compiled kernels run in cases of ops, whatever this machine would choose."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain import testing
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.native_kernels import NOTE
from onnxtrain.testing import OpCase


def compiled(node: ir.Node, device: str) -> Kernel:
    """The candidate of the compiled kernel where there is one."""
    found = definition_of(node).candidates(node, device)
    return next((kernel for kernel in found if kernel.name == "compiled"), found[0])


def let_cases_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes on the nodes of cases that they may run compiled C++."""
    plain = testing.case_graph

    def noted(case: OpCase, dtype: torch.dtype) -> Any:
        model = plain(case, dtype)
        for node in model.graph:
            node.metadata_props[NOTE] = "on"
        return model

    monkeypatch.setattr(testing, "case_graph", noted)
