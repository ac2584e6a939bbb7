"""Notes on nodes that their kernels read: how random numbers are drawn, and whether compiled C++ may run."""

from __future__ import annotations

import onnx_ir as ir
import torch

from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.native_kernels import NOTE
from onnxtrain.ops.random.dropout import MASKS
from onnxtrain.options import Options


def annotate_kernels(graph: ir.Graph, options: Options, device: torch.device) -> None:
    """Notes on nodes how they draw, and whether they may run compiled C++: their kernels ask.

    A GPU's own dropout draws eager's numbers, and nothing is cheaper there. Compiled kernels take the place of others
    when they are ready, in the middle of a run: not where two runs are to give the same bits.
    """
    fast = options.rng == "fast" and device.type == "cpu"
    native = device.type == "cpu" and may_compile_in_background(options)
    for node in graph:
        if Effects.RANDOM in definition_of(node).effects:
            node.metadata_props["rng"] = "fast" if fast else "torch"
            if device.type == "cpu":
                node.metadata_props[MASKS] = "packed"
            node.metadata_props["draws"] = "any" if options.rng == "fast" else "eager's"
        if native:
            node.metadata_props[NOTE] = "on"


def may_compile_in_background(options: Options) -> bool:
    """Whether compiled C++ may take the place of operators when it is ready, in the middle of a run."""
    return options.kernels != "pytorch" and options.rng == "fast" and not torch.are_deterministic_algorithms_enabled()
