"""Run the compiled kernels in cases of ops, whatever kernel this machine would choose."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain.native import Library, compiler
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


def on_other_processors(test: Callable[..., None]) -> Any:
    """Run a slow test for processors without AVX-512 and without AVX; it calls `compiled_for` with its arguments."""
    for mark in (
        pytest.mark.parametrize("processor", ["x86-64", "haswell"]),
        pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for x86"),
        pytest.mark.slow,
    ):
        test = mark(test)
    return test


def compiled_for(processor: str, library: Library, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Library:
    """Compile a library's source for another processor, in a cache of its own."""
    with monkeypatch.context() as patch:
        patch.setenv("ONNXTRAIN_CACHE_DIR", str(tmp_path))
        flags = compiler.flags()
        patch.setattr(compiler, "flags", lambda **_: (*flags[:-1], f"-march={processor}"))
        other = Library(library.name, library.source, library.signatures)
        assert other.wait(), other.failure
    return other
