"""All op definitions, found by domain and name, and by the ATen overload they are captured from."""

from __future__ import annotations

import onnx_ir as ir

from onnxtrain.errors import GraphError
from onnxtrain.graph.builder import Builder
from onnxtrain.ops.definition import FromTorch, NodeView, OpDef

OPS: dict[tuple[str, str], OpDef] = {}
FROM_TORCH: dict[str, FromTorch] = {}


def define(op: OpDef) -> OpDef:
    """Adds a definition. Raises GraphError where the op or an ATen overload is defined twice."""
    key = (op.domain, op.name)
    if key in OPS:
        raise GraphError(f"{op.domain}::{op.name} is defined twice")
    OPS[key] = op
    for overload, convert in op.from_torch.items():
        if overload in FROM_TORCH:
            raise GraphError(f"{overload} is captured twice, the second time by {op.name}")
        FROM_TORCH[overload] = convert
    return op


def lookup(domain: str, name: str) -> OpDef:
    """The definition of an op. Raises GraphError where there is none."""
    op = OPS.get((domain, name))
    if op is None:
        raise GraphError(f"{domain or 'ai.onnx'}::{name} has no definition in onnxtrain.ops")
    return op


def definition_of(node: ir.Node) -> OpDef:
    return lookup(node.domain, node.op_type)


def view(node: ir.Node) -> NodeView:
    return definition_of(node).view(node)


def builder(graph: ir.Graph) -> Builder:
    """A builder that types its nodes by these definitions."""
    return Builder(graph, lookup)
