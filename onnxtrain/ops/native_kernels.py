"""Whether a node may run a C++ kernel of `onnxtrain.native`: those kernels call it in their `applies`."""

from __future__ import annotations

from onnxtrain.ops.definition import NodeView

NOTE = "native"  # metadata of nodes: set when a module is compiled, copied by gradient rules and passes


def may_compile(n: NodeView, device: str) -> bool:
    """Return whether the node runs on a CPU and native kernels are on."""
    return device == "cpu" and n.node.metadata_props.get(NOTE) == "on"
