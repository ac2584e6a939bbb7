"""All op definitions, found by domain and name, and by the ATen overload they are captured from."""

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
    """Adds a definition. Raises GraphError where the op or an ATen overload is defined twice."""
    key = (op.domain, op.name)
    if key in OPS:
        raise GraphError(f"{op.domain}::{op.name} is defined twice")
    OPS[key] = op
    register_captures(op.from_torch)
    return op


def register_captures(from_torch: Mapping[str, FromTorch]) -> None:
    """Adds captures of ATen overloads, such as become several ops. Raises GraphError where one is there already."""
    twice = from_torch.keys() & FROM_TORCH.keys()
    if twice:
        raise GraphError(f"{', '.join(sorted(twice))} is captured twice")
    FROM_TORCH.update(from_torch)


def lookup(domain: str, name: str) -> OpDef:
    """The definition of an op. Raises GraphError where there is none."""
    op = OPS.get((domain, name))
    if op is None:
        raise GraphError(f"{domain or 'ai.onnx'}::{name} has no definition in onnxtrain.ops")
    return op


def definition_of(node: ir.Node) -> OpDef:
    return OPS.get((node.domain, node.op_type)) or lookup(node.domain, node.op_type)


def view(node: ir.Node) -> NodeView:
    return definition_of(node).view(node)


def builder(graph: ir.Graph) -> Builder:
    """A builder that types its nodes by these definitions."""
    return Builder(graph, lookup)


def capture_call(op: Builder, overload: str, gives: TensorType, *arguments: Any, **named: Any) -> ir.Value:
    """Captures an ATen call that the one being captured is composed of; its result has the type `gives`."""
    before, op.out = op.out, (gives,)
    try:
        result: ir.Value = FROM_TORCH[overload](op, *arguments, **named)
    finally:
        op.out = before
    return result
