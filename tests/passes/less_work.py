"""Helpers of the tests of passes that skip work: compare a model with eager, and read its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain import DebugOptions, ORTModule
from onnxtrain.onnx_file import without_case_suffix
from tests.zoo.checks import compared
from tests.zoo.entry import Call, Draw, ZooModel

WORDS, WIDTH, CLASSES = 20, 16, 5
DTYPES = (torch.float32,)  # with float64 under --slow: these passes do not ask for the dtype (conftest.py)


def check_equals_eager(
    make: Callable[[], torch.nn.Module],
    call: Callable[[Draw, int, int], Call],
    sizes: Sequence[tuple[int, int]] = ((3, 9), (1, 6), (2, 4)),
    loss: Callable[[Any], torch.Tensor] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> None:
    """Loss and gradients by the one tolerance, all sizes on one capture, by default in `DTYPES`."""
    entry = ZooModel("model", make, call, loss or _own, sizes=tuple(sizes))
    for dtype in DTYPES if dtypes is None else dtypes:
        with compared(entry, dtype) as compare:
            for size in entry.sizes:
                compare.train(*size)


def _own(output: Any) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    return output if output.dim() == 0 else output.square().mean()


def wrap(module: torch.nn.Module, folder: Path, **options: Any) -> ORTModule:
    """The module as an ORTModule that writes its graphs to `folder`."""
    return ORTModule(module.train(), DebugOptions(save_onnx=True, onnx_prefix="m", save_path=folder), **options)


def forward_graph(folder: Path) -> ir.Graph:
    """The optimized forward graph of a module that `wrap` made, after its first call."""
    graph = ir.load(folder / "m_optimized_pre_grad_training.onnx").graph
    for node in graph:
        node.op_type = without_case_suffix(node.op_type)
    return graph


def shapes(graph: ir.Graph, op_type: str) -> list[str]:
    """The shapes of the first outputs of all nodes of a kind, symbols and all."""
    return [str(node.outputs[0].shape) for node in graph if node.op_type == op_type]


def refusals(model: ORTModule, name: str) -> list[str]:
    """Return what a pass refused in the newest compilation."""
    return [str(refusal) for refusal in model.report().refused if refusal.pass_name == name]


def applied_by(model: ORTModule, name: str) -> list[str]:
    """Return what a pass applied in the newest compilation."""
    return [text for stage in model.report().stages for text in stage.applied if text.startswith(f"{name}:")]
