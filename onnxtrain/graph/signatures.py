"""Keys of nodes that are equal in all that analyses of single nodes depend on: work done once per key, not per node."""

from __future__ import annotations

from collections.abc import Hashable

import onnx_ir as ir

from onnxtrain.graph import sizes

_COMPARED = frozenset(
    getattr(ir.AttributeType, kind) for kind in ("INT", "INTS", "FLOAT", "FLOATS", "STRING", "STRINGS")
)


def attributes_key(node: ir.Node) -> Hashable | None:
    """Return a key of the node's attributes; None if one is a graph or a tensor, too expensive to compare."""
    attributes: list[Hashable] = []
    for attribute in node.attributes.data.values():
        if attribute.type not in _COMPARED:
            return None
        value = attribute.value
        attributes.append((attribute.name, attribute.type, tuple(value) if isinstance(value, list) else value))
    return tuple(attributes)


def types_key(node: ir.Node) -> Hashable | None:
    """Return a key of the types of the node's inputs and outputs; None if one has no type."""
    types: list[Hashable] = []
    for value in (*node.inputs, None, *node.outputs):
        if value is None:
            types.append(None)
        elif value.dtype is None or value.shape is None:
            return None
        else:
            types.append((value.dtype, sizes.dims_of(value)))
    return tuple(types)
