"""Whether a node may run compiled C++ (`onnxtrain.native`): kernels that do ask it in their `applies`."""

from __future__ import annotations

from onnxtrain.ops.definition import NodeView

NOTE = "native"  # metadata of nodes; the compiler of a module writes it, rules and passes hand it on


def may_compile(n: NodeView, device: str) -> bool:
    return device == "cpu" and n.node.metadata_props.get(NOTE) == "on"
