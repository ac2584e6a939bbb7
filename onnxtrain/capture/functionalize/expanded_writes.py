"""Writes to an expanded view: several of its elements are one in memory, and functionalization would add them up."""

from __future__ import annotations

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule

from onnxtrain.capture.convert.convert import line_of
from onnxtrain.capture.functionalize.no_grad import written_arguments
from onnxtrain.errors import CaptureError


def refuse_writes_to_expanded(program: ExportedProgram) -> None:
    """Refuse a forward that writes to an expanded view.

    Raises:
        CaptureError: forward does.
    """
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if any(_is_expanded(written.meta.get("val")) for written in written_arguments(node)):
                raise CaptureError(
                    "forward writes to an expanded view, of which several elements are one in memory",
                    where=line_of(node),
                    got=str(node.target),
                    todo="the module runs in PyTorch; write to the tensor that is expanded, or clone() it first",
                )


def _is_expanded(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    for size, stride in zip(value.shape, value.stride(), strict=True):
        is_one = isinstance(size, int) and size <= 1
        if isinstance(stride, int) and stride == 0 and not is_one:
            return True
    return False
