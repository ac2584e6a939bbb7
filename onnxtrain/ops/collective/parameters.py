"""The collectives of parameters that are sharded over data-parallel ranks (`distributed/parameters.py`).

    GatherParameter(x)   the shards of all ranks, one after another along axis 0
    ReduceGradient(x)    the mean over the ranks, of which each rank gets its part of axis 0

As ops they are AllGather and ReduceScatter. The ranks compute with different data, so that the gradient of a parameter
is the mean of theirs. A gathered parameter is the same each time: backward may gather it again instead of keeping it.
With `keep=1` it is kept. `order` numbers the parameters of a graph by their first readers in forward.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN
from onnxtrain.ops.collective.transfers import (
    GROUP,
    IN_GROUP,
    NO_BODY,
    Operator,
    all_gather,
    capture_operator,
    gathered_on_fakes,
    gathered_type,
    shard_type,
    wait,
)
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat.collectives import functional_collectives

Tensor = torch.Tensor

_AVERAGED = (torch.float32, torch.bfloat16)  # as in FSDP2: a sum of float16 could overflow before its division


def _reduce_gradient(x: Tensor, size: int, group: str) -> Tensor:
    if size == 1:
        return x.clone()
    averages = x.dtype in _AVERAGED
    terms = x.contiguous() if averages else x / size
    result: Tensor = functional_collectives.reduce_scatter_tensor(terms, "avg" if averages else "sum", size, group)
    return result


def _gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return wait(op, op.own.ReduceGradient(dy, size=n.size, rank=n.rank, group=n.group, order=n.order), dy)


_OPERATOR = Operator(f"gather_parameter(Tensor x, {IN_GROUP})", gathered_on_fakes)
_ATTRIBUTES: dict[str, Any] = {**GROUP, "order": 0}

GATHER_PARAMETER = define(
    OpDef(
        domain=OWN,
        name="GatherParameter",
        inputs=("x",),
        outputs=("y",),
        attributes={**_ATTRIBUTES, "keep": 0},
        from_torch={f"onnxtrain.{_OPERATOR.define()}.default": capture_operator("GatherParameter", _OPERATOR)},
        shapes=gathered_type,
        body=NO_BODY,
        gradient=(Gradient(_gradient, ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, x: Call(all_gather, x, n.size, n.group)),),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
    )
)
REDUCE_GRADIENT = define(
    OpDef(
        domain=OWN,
        name="ReduceGradient",
        inputs=("x",),
        outputs=("y",),
        attributes=_ATTRIBUTES,
        from_torch={},
        shapes=shard_type,
        body=NO_BODY,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=lambda n, x: Call(_reduce_gradient, x, n.size, n.group)),),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
    )
)
FLOPS.register(GATHER_PARAMETER, lambda n: 0)
FLOPS.register(REDUCE_GRADIENT, lambda n: 0)
