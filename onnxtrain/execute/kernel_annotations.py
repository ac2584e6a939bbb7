"""Annotate nodes for their kernels (the random generator, compiled C++ or Triton); which parts Inductor compiles."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir
import torch

from onnxtrain.ops import Effects, definition_of
from onnxtrain.ops.native_kernels import NATIVE, NOTE
from onnxtrain.ops.random.dropout import MASKS
from onnxtrain.options import Options


def annotate_kernels(graph: ir.Graph, options: Options, device: torch.device) -> None:
    """Write to the metadata of nodes which random generator they use and which compiled kernels may run.

    On a GPU, PyTorch's dropout samples as eager does, and nothing is faster. Compiled kernels replace others as soon as
    they are built, in the middle of training: they are off if two runs must give the same bits.
    """
    fast = options.rng == "fast" and device.type == "cpu"
    native = NATIVE.get(device.type) if may_compile_in_background(options) else None
    for node in graph:
        if Effects.RANDOM in definition_of(node).effects:
            node.metadata_props["rng"] = "fast" if fast else "torch"
            if device.type == "cpu":
                node.metadata_props[MASKS] = "packed"
            node.metadata_props["samples"] = "any" if options.rng == "fast" else "eager's"
        if native is not None:
            node.metadata_props[NOTE] = native


def may_compile_in_background(options: Options) -> bool:
    """Return whether compiled C++ may replace operators as soon as it is built, in the middle of training."""
    return options.kernels != "pytorch" and options.rng == "fast" and not torch.are_deterministic_algorithms_enabled()


def inductor_compiles(options: Options, device: torch.device) -> Literal["regions", "programs"] | None:
    """Return which parts of a step PyTorch's Inductor compiles under the option `kernels`; None: none.

    Regions are for a CPU: AOTInductor of PyTorch 2.11 crashed when it compiled a region for an NVIDIA H200.
    """
    if options.kernels == "inductor":
        return "programs"
    if options.kernels in ("fused", "fused-all"):
        return "regions" if device.type == "cpu" else "programs"
    return None
