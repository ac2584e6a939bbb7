"""How scalar factors move through ops, or become part of them, for `passes/fold_scalar_factors.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.ops.definition import NodeView
from onnxtrain.ops.interfaces import OpInterface


class ScalarFactor(NamedTuple):
    """How a scalar factor moves through a node.

    Attributes:
        inputs: the names of the inputs that may be multiplied by the factor.
        scales_output: whether multiplying one of these inputs multiplies the first output by the same factor, so that
            the factor may move from one to the other.
        absorb: (op, node, factor) -> the outputs of a node that multiplies by the factor at no cost; it returns None
            for a factor that is not exact there. None: no node can.
    """

    inputs: frozenset[str]
    scales_output: bool
    absorb: Callable[[Builder, NodeView, float], Sequence[ir.Value] | None] | None


# From the node; None if no factor can move through it.
SCALAR_FACTORS = OpInterface[Callable[[NodeView], ScalarFactor | None]]("scalar factors")
