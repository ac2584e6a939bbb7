"""All op definitions by domain and name, and all captures by ATen overload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType
from onnxtrain.ops.definition import FromTorch, NodeView, OpDef

OPS: dict[tuple[str, str], OpDef] = {}
FROM_TORCH: dict[str, FromTorch] = {}


def define(op: OpDef) -> OpDef:
    """Register a definition. Raises GraphError if the op or one of its ATen overloads is registered already."""
    key = (op.domain, op.name)
    if key in OPS:
        raise GraphError(f"{op.domain or 'ai.onnx'}::{op.name} is defined twice")
    OPS[key] = op
    register_captures(op.from_torch)
    return op


def register_captures(from_torch: Mapping[str, FromTorch]) -> None:
    """Register captures of ATen overloads, such as those that become several ops.

    Raises:
        GraphError: an overload has a capture already.
    """
    duplicates = from_torch.keys() & FROM_TORCH.keys()
    if duplicates:
        raise GraphError("ATen overloads are captured by two definitions", got=", ".join(sorted(duplicates)))
    FROM_TORCH.update(from_torch)


def lookup(domain: str, name: str) -> OpDef:
    """Return the definition of an op. Raises GraphError if there is none."""
    op = OPS.get((domain, name))
    if op is None:
        raise GraphError(
            f"{domain or 'ai.onnx'}::{name} has no definition in onnxtrain.ops",
            todo="define it (docs/development/adding-an-op.md)",
        )
    return op


def definition_of(node: ir.Node) -> OpDef:
    return OPS.get((node.domain, node.op_type)) or lookup(node.domain, node.op_type)


def view(node: ir.Node) -> NodeView:
    return definition_of(node).view(node)


def input_of(value: ir.Value, op: OpDef) -> ir.Value | None:
    """Return the first input of the node that computes `value`; None if that is not a node of this op."""
    node = value.producer()
    return node.inputs[0] if node is not None and definition_of(node) is op else None


def builder(graph: ir.Graph) -> Builder:
    """Return a builder that infers the types of its nodes from these definitions."""
    return Builder(graph, lookup)


def capture_call(op: Builder, overload: str, output_type: TensorType, *arguments: Any, **keywords: Any) -> ir.Value:
    """Capture an ATen call that is one part of the call being captured."""
    outer_types, op.out = op.out, (output_type,)
    try:
        result: ir.Value = FROM_TORCH[overload](op, *arguments, **keywords)
    finally:
        op.out = outer_types
    return result
