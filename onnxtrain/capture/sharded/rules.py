"""What PyTorch's functions do with sharded values: which layouts they take, and which their result has.

A function without a rule here is refused, and the module runs in PyTorch. A rule gives a replicated operand to ops
whose results differ between the ranks as `for_shards`, so that the ranks' gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from onnxtrain.capture.sharded.layout import PARTIAL, REPLICATED, Layout
from onnxtrain.capture.sharded.loss import cross_entropy
from onnxtrain.capture.sharded.value import ShardedValue, refuse, sharded_arguments
from onnxtrain.ops.collective.transfers import OPERATORS

Function: TypeAlias = Callable[..., Any]
Rule: TypeAlias = Callable[..., Any]


def apply(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Apply a function of PyTorch to arguments of which some are sharded values."""
    raw_name = getattr(function, "__name__", "")
    name = raw_name.strip("_")
    if kwargs.get("inplace") or (raw_name.endswith("_") and not raw_name.endswith("__")):
        # Whether values computed from its former elements, such as a gathered one, change would depend on chance.
        raise refuse(f"{name} changes a DTensor in place", "a function that returns another DTensor")
    rule = _RULES.get(name)
    if rule is None:
        raise refuse("an operator on DTensors has no rule for a capture", got=name or repr(function))
    others = [v for v in (*args, *kwargs.values()) if not issubclass(type(v), ShardedValue)]
    if any(isinstance(other, torch.Tensor) and other.dim() for other in others):
        if name not in _TAKE_TENSORS:
            raise refuse(f"{name} mixes a DTensor and a torch.Tensor", "DTensors only, as in PyTorch")
    # Under FSDP, which caches meshes, parameters may be on an earlier mesh that is equal, with another group.
    if len({value.group.mesh for value in sharded_arguments(args, kwargs)}) > 1:
        raise refuse(f"{name} mixes DTensors on different meshes", "one mesh")
    return rule(function, *args, **kwargs)


# Elementwise functions


def _elementwise(function: Function, *args: Any, **kwargs: Any) -> ShardedValue:
    """Apply a function to shards of the same part, or to replicated values, which may be broadcast."""
    values = sharded_arguments(args, kwargs)
    ndim = max(value.ndim for value in values)
    axes = {value.layout.axis - value.ndim for value in values if value.layout.kind == "sharded"}
    if any(value.layout == PARTIAL for value in values):
        return _sum_of_partials(function, values, args, kwargs)
    if len(axes) > 1:
        raise refuse(f"{function.__name__} combines DTensors that are sharded differently", "one sharded dimension")
    if not axes:
        return _on_locals(function, args, kwargs, REPLICATED, lambda value: value.local)
    (from_end,) = axes

    def operand(value: ShardedValue) -> torch.Tensor:
        is_broadcast = value.ndim + from_end < 0 or value.shape[from_end] == 1
        if value.layout == REPLICATED and not is_broadcast:
            return value.redistributed(Layout("sharded", value.ndim + from_end)).local
        return value.for_shards

    return _on_locals(function, args, kwargs, Layout("sharded", ndim + from_end), operand)


def _sum_of_partials(
    function: Function, values: list[ShardedValue], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ShardedValue:
    is_linear = function.__name__.strip("_") in ("add", "sub", "neg") and len(values) == len(args) and not kwargs
    if not is_linear or any(value.layout != PARTIAL for value in values):
        raise refuse(f"{function.__name__} has a DTensor with the placement Partial()", "Replicate() or Shard(dim)")
    return _on_locals(function, args, kwargs, PARTIAL, lambda value: value.local)


def _on_locals(
    function: Function,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layout: Layout,
    operand: Callable[[ShardedValue], torch.Tensor],
) -> ShardedValue:
    def local(argument: Any) -> Any:
        return operand(argument) if isinstance(argument, ShardedValue) else argument

    result = function(*map(local, args), **{name: local(argument) for name, argument in kwargs.items()})
    return sharded_arguments(args, kwargs)[0].with_local(result, layout)


def _converted(function: Function, x: ShardedValue, *args: Any, **kwargs: Any) -> ShardedValue:
    """Convert to a dtype, which may be that of another value, whose layout does not matter."""
    args = tuple(argument.dtype if isinstance(argument, ShardedValue) else argument for argument in args)
    return _elementwise(torch.Tensor.to, x, *args, **kwargs)


def _dropout(function: Function, x: ShardedValue, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drop elements of the tensor of this rank, as PyTorch does on a CPU."""
    if not training or p == 0:
        return x
    if x.device.type != "cpu":
        problem = "dropout has a DTensor on a device whose generator PyTorch advances for the other ranks"
        raise refuse(problem, "cpu, p=0 or eval mode", x.device.type)
    if x.layout == PARTIAL:
        raise refuse("dropout has a DTensor with the placement Partial()", "Replicate() or Shard(dim)")
    return x.with_local(F.dropout(x.local, p))


# Functions of dimensions


def _axis(dim: int, ndim: int) -> int:
    return dim % ndim if ndim else dim


def _over_other_dims(function: Function, x: ShardedValue, dim: Any = None, *args: Any, **kwargs: Any) -> ShardedValue:
    """Apply a softmax or a reduction that keeps its dimensions, over dimensions that are not sharded."""
    dims = [_axis(d, x.ndim) for d in ((dim,) if isinstance(dim, int) else dim or range(x.ndim))]
    keeps = function.__name__.endswith("softmax") or kwargs.get("keepdim", args[:1] == (True,))
    if x.layout == PARTIAL or x.layout.axis in dims or not keeps:
        raise refuse(
            f"{function.__name__} has a DTensor over dimensions that a graph does not support",
            "keepdim=True, and dimensions that are not sharded",
            f"{x.layout}, dim={dim}",
        )
    return x.with_local(function(x.local, dim, *args, **kwargs))


def _norm(function: Function, x: ShardedValue, normalized_shape: Any, *args: Any, **kwargs: Any) -> ShardedValue:
    """Normalize each row of its own shard."""
    parameters = sharded_arguments(args, kwargs)
    normalized = x.ndim - len(tuple(normalized_shape))
    if x.layout == PARTIAL or x.layout.axis >= normalized or any(p.layout != REPLICATED for p in parameters):
        raise refuse(
            f"{function.__name__} has a DTensor that is sharded along the dimensions that it normalizes",
            "another sharded dimension, and replicated parameters",
            str(x.layout),
        )

    def local(argument: Any) -> Any:
        if not isinstance(argument, ShardedValue):
            return argument
        return argument.local if x.layout == REPLICATED else argument.for_shards

    result = function(x.local, normalized_shape, *map(local, args), **{k: local(v) for k, v in kwargs.items()})
    return x.with_local(result)


def _transpose(function: Function, x: ShardedValue, dim0: int, dim1: int) -> ShardedValue:
    first, second = _axis(dim0, x.ndim), _axis(dim1, x.ndim)
    moved = {first: second, second: first}
    layout = Layout(x.layout.kind, moved.get(x.layout.axis, x.layout.axis))
    return x.with_local(x.local.transpose(dim0, dim1), layout)


def _flatten(function: Function, x: ShardedValue, start_dim: int = 0, end_dim: int = -1) -> ShardedValue:
    start, end, axis = _axis(start_dim, x.ndim), _axis(end_dim, x.ndim), x.layout.axis
    if start <= axis <= end and start != end:
        raise refuse("flatten has a DTensor over its sharded dimension", "other dimensions", str(x.layout))
    layout = Layout(x.layout.kind, axis - (end - start)) if axis > end else x.layout
    return x.with_local(x.local.flatten(start, end), layout)


def _view(function: Function, x: ShardedValue, *shape: Any) -> ShardedValue:
    """Reshape the dimensions before the last, which alone may be sharded."""
    wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int | torch.SymInt) else shape
    keeps_last = len(wanted) > 0 and (wanted[-1] == x.shape[-1])
    if x.layout.kind == "sharded" and not (x.layout.axis == x.ndim - 1 and keeps_last):
        raise refuse("view has a DTensor whose sharded dimension it may change", "a last dimension that stays")
    if x.layout.kind == "sharded":
        return x.with_local(x.local.reshape(*wanted[:-1], x.local.shape[-1]), Layout("sharded", len(wanted) - 1))
    return x.with_local(x.local.reshape(wanted))


# Layers


def _linear(function: Function, x: ShardedValue, weight: Any, bias: Any = None) -> ShardedValue:
    """Compute a linear layer: sharded by columns (of the output), by rows (of the input), or over the rows of x."""
    _expect_sharded("linear", x, weight, bias)
    split, last = weight.layout.axis, x.ndim - 1
    if weight.layout == REPLICATED:
        if x.layout.axis == last or x.layout == PARTIAL:
            problem = "a linear layer with a replicated weight has an input that is sharded along its features"
            raise refuse(problem, "other dimensions", str(x.layout))
        return _on_locals(function, (x, weight, bias), {}, x.layout, _operand_of(x.layout))
    if split == 0:
        x = x.redistributed(REPLICATED)
        _expect_layout("the bias of a linear layer that is sharded by columns", bias, weight.layout)
        local = F.linear(x.for_shards, weight.local, None if bias is None else bias.local)
        return x.with_local(local, Layout("sharded", last))
    x = x.redistributed(Layout("sharded", last))
    _expect_layout("the bias of a linear layer that is sharded by rows", bias, REPLICATED)
    share = None if bias is None else OPERATORS.share_of_sum(bias.local, x.group.size)
    return x.with_local(F.linear(x.local, weight.local, share), PARTIAL)


def _operand_of(layout: Layout) -> Callable[[ShardedValue], torch.Tensor]:
    return lambda value: value.local if layout == REPLICATED else value.for_shards


def _embedding(
    function: Function,
    indices: ShardedValue,
    weight: ShardedValue,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> ShardedValue:
    """Look up rows: of a weight that is sharded by rows, only its own, and zeros for the others."""
    _expect_sharded("embedding", indices, weight)
    if max_norm is not None or scale_grad_by_freq or sparse or (padding_idx is not None and weight.layout.axis == 0):
        raise refuse("a sharded embedding has options that a graph does not support", "the defaults")
    if weight.layout == REPLICATED or indices.layout != REPLICATED:
        if weight.layout != REPLICATED or indices.layout == PARTIAL:
            raise refuse("a sharded embedding has sharded indices", "replicated indices", str(indices.layout))
        return _on_locals(function, (indices, weight, padding_idx), {}, indices.layout, _operand_of(indices.layout))
    if weight.layout.axis == 1:
        local = F.embedding(indices.local, weight.local, padding_idx)
        return indices.with_local(local, Layout("sharded", indices.ndim))
    rows = weight.local.shape[0]
    own = indices.local - weight.group.rank * rows
    others = (own < 0) | (own >= rows)
    embedded = F.embedding(own.masked_fill(others, 0), weight.local)
    return indices.with_local(embedded.masked_fill(others.unsqueeze(-1), 0.0), PARTIAL)


def _expect_sharded(name: str, *arguments: Any) -> None:
    if not all(argument is None or isinstance(argument, ShardedValue) for argument in arguments):
        raise refuse(f"{name} mixes a DTensor and a torch.Tensor", "DTensors only, as in PyTorch")


def _expect_layout(operand: str, value: Any, layout: Layout) -> None:
    if value is not None and value.layout != layout:
        raise refuse(f"{operand} has a layout that a graph does not support", str(layout), str(value.layout))


_ELEMENTWISE = (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "div", "true_divide", "pow", "rpow", "neg",
    "relu", "gelu", "silu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "square", "abs", "float", "half", "bfloat16",
    "double", "detach", "contiguous", "clone",
)  # fmt: skip
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(("to", "type_as"), _converted),
    **dict.fromkeys(("mean", "sum", "amax", "softmax", "log_softmax"), _over_other_dims),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("view", "reshape"), _view),
    "dropout": _dropout,
    "transpose": _transpose,
    "flatten": _flatten,
    "linear": _linear,
    "embedding": _embedding,
    "cross_entropy": cross_entropy,
}
_TAKE_TENSORS = frozenset({"cross_entropy"})

ShardedValue.apply = staticmethod(apply)
