"""The collectives of parameters that are sharded over data-parallel ranks (`distributed/parameters.py`).

    GatherParameters(xs)   of each x the shards of all ranks, one after another along axis 0
    ReduceGradients(xs)    of each x the mean over the ranks, of which each rank gets its part of axis 0

Where other ranks have replicas of the shards (HSDP), the mean is also over the `replicas` ranks of `replica_group`.

The ranks compute with different data, so that the gradient of a parameter is the mean of theirs. A gathered parameter
is the same each time: backward may gather it again instead of keeping it. With `keep=1` it is kept. `orders`
numbers the parameters of a graph by their first readers in forward. A capture gathers each parameter by itself;
`plan/parameter_buckets.py` joins nodes up to `bucket_bytes`, and `plan/parameter_order.py` starts them early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of
from onnxtrain.ops.collective.transfers import (
    GROUP,
    IN_GROUP,
    NO_BODY,
    Operator,
    all_gather,
    capture_operator,
    complete,
    gathered_on_fakes,
    wait,
)
from onnxtrain.ops.definition import NOT_DIFFERENTIABLE, Call, Effects, Gradient, Kernel, NodeView, OpDef
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat.collectives import functional_collectives

Tensor = torch.Tensor

_AVERAGED = (torch.float32, torch.bfloat16)  # as in FSDP2: a sum of float16 could overflow before its division


def _gather_parameters(xs: Sequence[Tensor], size: int, group: str) -> Sequence[Tensor]:
    if size == 1:
        return [x.clone() for x in xs]
    results: list[Tensor] = functional_collectives.all_gather_into_tensor_coalesced(
        [x.contiguous() for x in xs], size, group
    )
    return results


def _reduce_gradient(x: Tensor, size: int, group: str, replicas: int, replica_group: str) -> Tensor:
    if size == 1:
        return _mean_over_replicas([x.clone()], replicas, replica_group)[0]
    terms, reduction = _terms([x], size)
    result: Tensor = functional_collectives.reduce_scatter_tensor(terms[0], reduction, size, group)
    return _mean_over_replicas([result], replicas, replica_group)[0]


def _reduce_gradients(
    xs: Sequence[Tensor], size: int, group: str, replicas: int, replica_group: str
) -> Sequence[Tensor]:
    if size == 1:
        return _mean_over_replicas([x.clone() for x in xs], replicas, replica_group)
    results: list[Tensor] = functional_collectives.reduce_scatter_tensor_coalesced(*_terms(xs, size), size, group)
    return _mean_over_replicas(results, replicas, replica_group)


def _mean_over_replicas(xs: Sequence[Tensor], replicas: int, group: str) -> Sequence[Tensor]:
    if replicas == 1:
        return xs
    terms = [complete(x) / replicas for x in xs]
    results: list[Tensor] = functional_collectives.all_reduce_coalesced(terms, "sum", group)
    return results


def _terms(xs: Sequence[Tensor], size: int) -> tuple[list[Tensor], str]:
    """Return what the ranks reduce, and how, to get the means of these."""
    if all(x.dtype in _AVERAGED for x in xs):
        return [x.contiguous() for x in xs], "avg"
    return [x / size for x in xs], "sum"


def _gradient(op: Builder, n: NodeView, *dys: ir.Value | None) -> Sequence[ir.Value | None]:
    attributes = {name: getattr(n, name) for name in _ATTRIBUTES}
    gradients: list[ir.Value | None] = [None] * len(dys)
    for i, dy in enumerate(dys):
        if dy is not None:
            mean = op.own.ReduceGradients(dy, **{**attributes, "orders": n.orders[i : i + 1] or None})
            gradients[i] = wait(op, mean, dy)
    return gradients


def _lower_gather(n: NodeView, xs: Sequence[Any]) -> Call:
    one, several = all_gather, _gather_parameters
    return Call(one, xs[0], n.size, n.group) if len(xs) == 1 else Call(several, xs, n.size, n.group)


def _lower_reduction(n: NodeView, xs: Sequence[Any]) -> Call:
    ranks = n.size, n.group, n.replicas, n.replica_group
    return Call(_reduce_gradient, xs[0], *ranks) if len(xs) == 1 else Call(_reduce_gradients, xs, *ranks)


def _gathered_types(n: NodeView) -> Sequence[TensorType]:
    shapes = map(sizes.dims_of, n.xs)
    return [
        TensorType(dtype_of(x), (sizes.multiply(n.size, rows), *others))
        for x, (rows, *others) in zip(n.xs, shapes, strict=True)
    ]


def _shard_types(n: NodeView) -> Sequence[TensorType]:
    shapes = map(sizes.dims_of, n.xs)
    return [
        TensorType(dtype_of(x), (sizes.floor_divide(rows, n.size), *others))
        for x, (rows, *others) in zip(n.xs, shapes, strict=True)
    ]


def _one_per_input(inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
    return len(inputs)


_OPERATOR = Operator(f"gather_parameter(Tensor x, {IN_GROUP}, int replicas, str replica_group)", gathered_on_fakes)
_REPLICAS = {"replicas": 1, "replica_group": ""}
_ATTRIBUTES: dict[str, Any] = {**GROUP, **_REPLICAS, "orders": (), "bucket_bytes": 0, "in_flight_bytes": 0}

GATHER_PARAMETERS = define(
    OpDef(
        domain=OWN,
        name="GatherParameters",
        inputs=("xs...",),
        outputs=("ys...",),
        attributes={**_ATTRIBUTES, "keep": 0},
        from_torch={f"onnxtrain.{_OPERATOR.define()}.default": capture_operator("GatherParameters", _OPERATOR)},
        shapes=_gathered_types,
        body=NO_BODY,
        gradient=(Gradient(_gradient, ()),),
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower_gather),),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
        count_outputs=_one_per_input,
    )
)
REDUCE_GRADIENTS = define(
    OpDef(
        domain=OWN,
        name="ReduceGradients",
        inputs=("xs...",),
        outputs=("ys...",),
        attributes=_ATTRIBUTES,
        from_torch={},
        shapes=_shard_types,
        body=NO_BODY,
        gradient=NOT_DIFFERENTIABLE,
        nondiff_inputs=frozenset(),
        kernels=(Kernel(lower=_lower_reduction),),
        axes=lambda n: NO_AXES,
        effects=Effects.COLLECTIVE,
        aliases={},
        count_outputs=_one_per_input,
    )
)
FLOPS.register(GATHER_PARAMETERS, lambda n: 0)
FLOPS.register(REDUCE_GRADIENTS, lambda n: 0)
