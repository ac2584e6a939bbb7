"""Collectives over a process group of `size` ranks, and the ops between values of one rank and of all.

    AllReduce(x)          the sum over the ranks; every rank has the same result
    AllGather(x)          the x of all ranks, one after another along axis 0
    ReduceScatter(x)      the sum over the ranks, of which each rank gets its part of axis 0
    WaitCollective(y, x)  y, which the collective of x returned, once it is complete
    CopyToGroup(x)        x, the same on every rank, for ops whose results differ between the ranks
    LocalShard(x)         the part of axis 0 that belongs to this rank; x is the same on every rank
    ShareOfSum(x)         x / size, so that the sum over the ranks is x, which is the same on every rank

A value that is the same on every rank has the same cotangent on every rank: that of the one value which it represents.
All gradients follow this rule: that of AllReduce is the identity, and that of CopyToGroup an AllReduce.
With `equal_cotangents=1` an AllGather has a result that only ops with the same result on every rank read; otherwise
the ranks' cotangents are to be summed.

A collective starts, and WaitCollective waits; it reads x so that no memory is reused meanwhile. All ranks run the same
graph, and so start the same collectives in the same order. The definitions follow JAX's varying and invariant values
(https://docs.jax.dev/en/latest/notebooks/shard_map.html) and Megatron's f and g (https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.axes import NO_AXES
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, TensorType, dtype_of
from onnxtrain.ops.constructors import same_as
from onnxtrain.ops.definition import REQUIRED, Call, Effects, Gradient, Kernel, Method, NoBody, NodeView, OpDef
from onnxtrain.ops.interfaces.cost import FLOPS
from onnxtrain.ops.registry import define
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.collectives import functional_collectives

Tensor = torch.Tensor

NO_BODY = NoBody("it communicates with other processes")

_LIBRARY = torch.library.Library("onnxtrain", "FRAGMENT")
OPERATORS = torch.ops.onnxtrain
IN_GROUP = "int size, int rank, str group"


class Operator(NamedTuple):
    """The operator that stands for an op while PyTorch captures; it runs on fake tensors only.

    Attributes:
        schema: of the operator, without the result.
        on_fakes: returns a tensor of the result's shape.
    """

    schema: str
    on_fakes: Callable[..., torch.Tensor]

    @property
    def attributes(self) -> list[str]:
        """The names of the arguments that are not tensors."""
        arguments = self.schema.partition("(")[2].rstrip(")").split(", ")
        return [name for kind, name in (argument.split() for argument in arguments) if kind != "Tensor"]

    def define(self) -> str:
        """Register the operator, and return its name."""
        name = self.schema.partition("(")[0]
        _LIBRARY.define(f"{self.schema} -> Tensor")
        dispatch.register_fake(_LIBRARY, f"onnxtrain::{name}", self.on_fakes)
        return name


def gathered_type(n: NodeView) -> tuple[TensorType]:
    rows, *others = sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (sizes.multiply(n.size, rows), *others)),)


def shard_type(n: NodeView) -> tuple[TensorType]:
    rows, *others = sizes.dims_of(n.x)
    return (TensorType(dtype_of(n.x), (sizes.floor_divide(rows, n.size), *others)),)


def wait(op: Builder, pending: ir.Value, source: ir.Value) -> ir.Value:
    """Return the result of a collective of `source`."""
    return op.own.WaitCollective(pending, source)


def _define(
    name: str,
    attributes: dict[str, Any],
    shapes: Callable[[NodeView], Sequence[TensorType]],
    gradient: Callable[..., Any],
    lower: Callable[..., Call],
    operator: Operator,
    *,
    inputs: tuple[str, ...] = ("x",),
    effects: Effects = Effects.COLLECTIVE,
    aliases: dict[int, int] | None = None,
) -> OpDef:
    definition = define(
        OpDef(
            domain=OWN,
            name=name,
            inputs=inputs,
            outputs=("y",),
            attributes=attributes,
            from_torch={f"onnxtrain.{operator.define()}.default": capture_operator(name, operator)},
            shapes=shapes,
            body=NO_BODY,
            gradient=(Gradient(gradient, ()),),
            nondiff_inputs=frozenset(),
            kernels=(Kernel(lower=lower),),
            axes=lambda n: NO_AXES,
            effects=effects,
            aliases=aliases or {},
        )
    )
    FLOPS.register(definition, lambda n: 0)
    return definition


def capture_operator(name: str, operator: Operator) -> Callable[..., ir.Value]:
    """Return the function that captures an operator as the op `name` of the same arguments."""
    return partial(_capture, name, operator)


def _capture(name: str, operator: Operator, op: Builder, *arguments: Any) -> ir.Value:
    tensors = [argument for argument in arguments if isinstance(argument, ir.Value)]
    attributes = dict(zip(operator.attributes, arguments[len(tensors) :], strict=True))
    return getattr(op.own, name)(*tensors, **attributes)


# Kernels


def _all_reduce(x: Tensor, reduction: str, size: int, group: str) -> Tensor:
    if size == 1:
        return x.clone()
    return functional_collectives.all_reduce(x.contiguous(), reduction, group)


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    if size == 1:
        return x.clone()
    return functional_collectives.all_gather_into_tensor(x.contiguous(), size, group)


def _reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    if size == 1:
        return x.clone()
    return functional_collectives.reduce_scatter_tensor(x.contiguous(), "sum", size, group)


def complete(pending: Tensor) -> Tensor:
    """Wait for the collective that returned a tensor, if it has not been waited for; return the tensor."""
    return functional_collectives.wait_tensor(pending)


def _wait(pending: Tensor, source: Tensor) -> Tensor:
    return complete(pending)


def sum_over_ranks(x: Tensor, size: int, group: str, reduction: str = "sum") -> Tensor:
    """Return the sum, or another reduction, of the x of all ranks."""
    return _wait(_all_reduce(x, reduction, size, group), x)


# Gradients


def _all_reduce_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return dy


def _all_gather_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    if n.equal_cotangents:
        return op.own.LocalShard(dy, group=n.group, size=n.size, rank=n.rank)
    return wait(op, op.own.ReduceScatter(dy, group=n.group, size=n.size, rank=n.rank), dy)


def _gathered_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    attributes = {"group": n.group, "size": n.size, "rank": n.rank}
    return wait(op, op.own.AllGather(dy, equal_cotangents=1, **attributes), dy)


def _copy_gradient(op: Builder, n: NodeView, dy: ir.Value) -> ir.Value:
    return wait(op, op.own.AllReduce(dy, size=n.size, group=n.group), dy)


def _local_shard(x: Tensor, size: int, rank: int) -> Tensor:
    rows = x.shape[0] // size
    return x.narrow(0, rank * rows, rows)


# Definitions


def _shaped_like_input(x: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(x)


def gathered_on_fakes(x: Tensor, size: int, *arguments: Any) -> Tensor:
    return x.new_empty((size * x.shape[0], *x.shape[1:]))


def _shard(x: Tensor, size: int, *arguments: Any) -> Tensor:
    return x.new_empty((x.shape[0] // size, *x.shape[1:]))


GROUP = {"size": REQUIRED, "rank": REQUIRED, "group": REQUIRED}

ALL_REDUCE = _define(
    "AllReduce",
    {"reduction": "sum", "size": REQUIRED, "group": REQUIRED},
    same_as("x"),
    _all_reduce_gradient,
    lambda n, x: Call(_all_reduce, x, n.reduction, n.size, n.group),
    Operator("all_reduce(Tensor x, str reduction, int size, str group)", _shaped_like_input),
)
ALL_GATHER = _define(
    "AllGather",
    {**GROUP, "equal_cotangents": 0},
    gathered_type,
    _all_gather_gradient,
    lambda n, x: Call(all_gather, x, n.size, n.group),
    Operator(f"all_gather(Tensor x, {IN_GROUP}, int equal_cotangents)", gathered_on_fakes),
)
REDUCE_SCATTER = _define(
    "ReduceScatter",
    GROUP,
    shard_type,
    _gathered_gradient,
    lambda n, x: Call(_reduce_scatter, x, n.size, n.group),
    Operator(f"reduce_scatter(Tensor x, {IN_GROUP})", _shard),
)
WAIT = _define(
    "WaitCollective",
    {},
    same_as("pending"),
    lambda op, n, dy: [dy, None],
    lambda n, pending, source: Call(_wait, pending, source),
    Operator("wait_collective(Tensor pending, Tensor source)", _shaped_like_input),
    inputs=("pending", "source"),
    aliases={0: 0},
)
COPY_TO_GROUP = _define(
    "CopyToGroup",
    {"size": REQUIRED, "group": REQUIRED},
    same_as("x"),
    _copy_gradient,
    lambda n, x: Method("view_as", x, x),
    Operator("copy_to_group(Tensor x, int size, str group)", _shaped_like_input),
    aliases={0: 0},  # with the effect of a collective two are never merged: eager sums their cotangents separately
)
LOCAL_SHARD = _define(
    "LocalShard",
    GROUP,
    shard_type,
    _gathered_gradient,
    lambda n, x: Call(_local_shard, x, n.size, n.rank),
    Operator(f"local_shard(Tensor x, {IN_GROUP})", _shard),
    effects=Effects.NONE,
    aliases={0: 0},
)
SHARE_OF_SUM = _define(
    "ShareOfSum",
    {"size": REQUIRED},
    same_as("x"),
    _all_reduce_gradient,
    lambda n, x: Call(torch.div, x, n.size),
    Operator("share_of_sum(Tensor x, int size)", _shaped_like_input),
    effects=Effects.NONE,
)
