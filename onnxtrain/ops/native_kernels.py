"""Whether a node may run a C++ kernel of `onnxtrain.native`, or a Triton kernel: their `applies` call it."""

from __future__ import annotations

import functools
import importlib.util

import torch

from onnxtrain.ops.definition import NodeView

NOTE = "native"  # metadata of nodes: set when a module is compiled, copied by gradient rules and passes
NATIVE = {"cpu": "on", "cuda": "triton"}  # its value, by device type, if native kernels are on
_OLDEST = (8, 0)  # the compute capability of GPUs whose code was compiled in tests


def may_compile(n: NodeView, device: str) -> bool:
    """Return whether the node runs on a CPU and native kernels are on."""
    return device == "cpu" and n.node.metadata_props.get(NOTE) == NATIVE["cpu"]


def may_run_triton(n: NodeView, device: str) -> bool:
    """Return whether the node runs on a GPU that Triton supports, and native kernels are on."""
    return device == "cuda" and n.node.metadata_props.get(NOTE) == NATIVE["cuda"] and _has_triton()


@functools.cache
def _has_triton() -> bool:
    is_nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    return (
        is_nvidia and torch.cuda.get_device_capability() >= _OLDEST and importlib.util.find_spec("triton") is not None
    )
