"""AllToAll: each rank of a group sends a part of its rows to each rank, as mixtures of experts do with tokens.

    AllToAll(x[n, ...], received[ranks], sent[ranks]) -> y[sum(received), ...]

`sent` are the numbers of rows of x for each rank, in order, and `received` those that come from each. The graph
computes them, so that they may differ between batches and ranks. The gradient is an AllToAll with both exchanged.
It is captured from `all_to_all_single` of torch.distributed's functional collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import OWN, TensorType, dtype_of, type_of
from onnxtrain.ops.collective.transfers import NO_BODY, WAIT, wait
from onnxtrain.ops.definition import REQUIRED, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import define, input_of
from onnxtrain.ops.symbolic_ints import required_ints
from onnxtrain.torch_compat.collectives import functional_collectives

Tensor = torch.Tensor


def _exchanged_type(n: NodeView) -> tuple[TensorType]:
    rows = sizes.add(*required_ints(n.received, "the numbers of rows that AllToAll receives"))
    return (TensorType(dtype_of(n.x), (rows, *sizes.dims_of(n.x)[1:])),)


def _exchange(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Start the exchange; kernels check the sums of `sent` and `received`, which a capture may have assumed."""
    if len(sent) == 1:
        (own,) = x.split_with_sizes(sent)[0].split_with_sizes(received)
        return own.clone()
    result: Tensor = functional_collectives.all_to_all_single(x.contiguous(), received, sent, group)
    return result


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> list[ir.Value | None]:
    # A data-dependent size of x may have two expressions: its own, and the sum of `sent`.
    back = op.node(OWN, "AllToAll", (dy, n.sent, n.received), {"group": n.group}, types=[type_of(n.x)])
    return [wait(op, back.outputs[0], dy), None, None]


def _capture(op: Builder, x: ir.Value, received: Sequence[Size], sent: Sequence[Size], group: Any) -> Any:
    if not isinstance(group, str):
        return NotImplemented
    attributes = {"group": str(group)}
    return op.node(OWN, "AllToAll", (x, op.sizes(received), op.sizes(sent)), attributes, types=op.out).outputs[0]


def _capture_wait(op: Builder, pending: ir.Value) -> Any:
    """Capture the wait for an exchange; a second one has nothing to wait for."""
    if input_of(pending, WAIT) is not None:
        return pending
    source = input_of(pending, ALL_TO_ALL)
    return NotImplemented if source is None else wait(op, pending, source)


ALL_TO_ALL = define(
    OpDef(
        domain=OWN,
        name="AllToAll",
        inputs=("x", "received", "sent"),
        outputs=("y",),
        attributes={"group": REQUIRED},
        from_torch={
            "_c10d_functional.all_to_all_single.default": _capture,
            "_c10d_functional_autograd.all_to_all_single.default": _capture,
            "_c10d_functional.wait_tensor.default": _capture_wait,
        },
        shapes=_exchanged_type,
        body=NO_BODY,
        gradient=(Gradient(_gradient, reads=("received", "sent")),),
        nondiff_inputs=frozenset({"received", "sent"}),
        kernels=(
            Kernel(
                lower=lambda n, x, received, sent: Call(_exchange, x, received, sent, n.group),
                host_inputs=frozenset({1, 2}),
            ),
        ),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
    )
)
FLOPS.register(ALL_TO_ALL, lambda n: 0)
