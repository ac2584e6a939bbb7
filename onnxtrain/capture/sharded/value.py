"""Stand in for DTensors while a module is captured: each is the local tensor of this rank, with its layout.

A DTensor decides which collectives run below autograd, where a trace for our own differentiation cannot see them. Here
they become operators of the trace, with the gradients that DTensor's autograd computes: a replicated value has the same
cotangent on every rank (`ops/collective/transfers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from onnxtrain.capture import source_location
from onnxtrain.capture.sharded.layout import PARTIAL, REPLICATED, Group, Layout, dtensor_class, sharding_of
from onnxtrain.errors import CaptureError
from onnxtrain.ops.collective.transfers import OPERATORS

Apply = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


def refuse(problem: str, expected: str | None = None, got: str | None = None) -> CaptureError:
    """Return the error of an operation on DTensors that a graph does not support."""
    return CaptureError(
        problem,
        where=source_location.of_caller(),
        expected=expected,
        got=got,
        todo="the module runs in PyTorch; convert the value by to_local() before, or use another layout",
    )


class ShardedValue:
    """A DTensor in a trace. Operators on it go to `apply`, which `rules` sets.

    Attributes:
        group: the ranks that hold it.
        layout: how their tensors make it up.
    """

    apply: Apply

    def __init__(self, group: Group, layout: Layout, local: torch.Tensor) -> None:
        self.group = group
        self.layout = layout
        self._local: torch.Tensor | None = local
        self._gathered_from: tuple[torch.Tensor, int] | None = None
        self._for_shards: torch.Tensor | None = None

    @property
    def local(self) -> torch.Tensor:
        """The tensor of this rank; of a replicated value, for ops with the same result on every rank."""
        if self._local is None:
            self._local = self._gather(equal_cotangents=True)
        return self._local

    @property
    def for_shards(self) -> torch.Tensor:
        """The tensor of this rank, for ops whose results differ between the ranks."""
        if self.layout != REPLICATED:
            return self.local
        if self._for_shards is None:
            if self._gathered_from is not None:
                self._for_shards = self._gather(equal_cotangents=False)
            else:
                self._for_shards = OPERATORS.copy_to_group(self.local, self.group.size, self.group.name)
        return self._for_shards

    def _gather(self, equal_cotangents: bool) -> torch.Tensor:
        assert self._gathered_from is not None
        shard, axis = self._gathered_from
        rows = shard.movedim(axis, 0)
        group = self.group
        pending = OPERATORS.all_gather(rows, group.size, group.rank, group.name, int(equal_cotangents))
        return _with_first_at(OPERATORS.wait_collective(pending, rows), axis)

    def with_local(self, local: torch.Tensor, layout: Layout | None = None) -> ShardedValue:
        """Return a value on the same ranks, by default with the same layout."""
        return ShardedValue(self.group, layout or self.layout, local)

    # The interface of DTensor

    @property  # type: ignore[misc]  # isinstance() finds a DTensor, as in PyTorch
    def __class__(self) -> Any:
        return dtensor_class()

    @staticmethod
    def from_local(
        local: torch.Tensor, device_mesh: Any = None, placements: Any = None, *, grad_placements: Any = None, **_: Any
    ) -> ShardedValue:
        group = Group.from_mesh(device_mesh)
        if placements is None or grad_placements is not None:
            raise refuse("DTensor.from_local is called without placements, or with grad_placements")
        return ShardedValue(group, Layout.from_placement(placements[0], local.dim()), local)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        if grad_placements is not None:
            raise refuse("DTensor.to_local is called with grad_placements")
        return self.local

    def full_tensor(self) -> torch.Tensor:
        return self.redistributed(REPLICATED).local

    def redistribute(self, device_mesh: Any = None, placements: Any = None, *, async_op: bool = False) -> ShardedValue:
        if device_mesh is not None and device_mesh != self.group.mesh:
            raise refuse("a DTensor is redistributed to another mesh", str(self.group.mesh), str(device_mesh))
        return self.redistributed(Layout.from_placement(placements[0], self.ndim))

    def redistributed(self, target: Layout) -> ShardedValue:
        """Return the value in another layout."""
        source, group = self.layout, self.group
        if source == target:
            return self
        if target == PARTIAL:
            raise refuse("a DTensor is redistributed to Partial()", "Replicate() or Shard(dim)")
        if source == REPLICATED:
            return self.with_local(self._shard(target.axis), target)
        if source == PARTIAL and target == REPLICATED:
            pending = OPERATORS.all_reduce(self.local, "sum", group.size, group.name)
            return self.with_local(OPERATORS.wait_collective(pending, self.local), target)
        if source == PARTIAL:
            stacked = _in_parts(self.local, target.axis, group.size)
            pending = OPERATORS.reduce_scatter(stacked, group.size, group.rank, group.name)
            return self.with_local(_with_first_at(OPERATORS.wait_collective(pending, stacked), target.axis), target)
        gathered = ShardedValue(group, REPLICATED, self.local)
        gathered._local, gathered._gathered_from = None, (self.local, source.axis)
        return gathered if target == REPLICATED else gathered.redistributed(target)

    def _shard(self, axis: int) -> torch.Tensor:
        group, parts = self.group, _in_parts(self.local, axis, self.group.size)
        return _with_first_at(OPERATORS.local_shard(parts, group.size, group.rank, group.name), axis)

    @property
    def placements(self) -> tuple[Layout, ...]:
        return (self.layout,)

    @property
    def device_mesh(self) -> Any:
        return self.group.mesh

    # The interface of a tensor

    @property
    def shape(self) -> torch.Size | tuple[Any, ...]:
        if self._local is None:
            assert self._gathered_from is not None
            shard, axis = self._gathered_from
            return _scaled(shard.shape, axis, self.group.size)
        if self.layout.kind == "sharded":
            return _scaled(self._local.shape, self.layout.axis, self.group.size)
        return self._local.shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    @property
    def _example(self) -> torch.Tensor:
        if self._local is not None:
            return self._local
        assert self._gathered_from is not None
        return self._gathered_from[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._example.dtype

    @property
    def device(self) -> torch.device:
        return self._example.device

    @property
    def requires_grad(self) -> bool:
        return self._example.requires_grad

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls.apply(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch.Tensor, name, None)
        if name.startswith("__") or not callable(function):
            raise AttributeError(f"a DTensor has no {name} in a capture")
        return partial(_call, function, self)


def as_container(value: Any) -> tuple[list[torch.Tensor], list[str], Any, Callable[[list[torch.Tensor]], Any]]:
    """Return a DTensor, or its stand-in, as a container of the tensor of this rank.

    The container is rebuilt as a DTensor, or in a trace as its stand-in.

    Raises:
        CaptureError: a graph does not support the layout.
    """
    if issubclass(type(value), ShardedValue):
        layout, group, local = value.layout, value.group, value.local
    else:
        layout, group = sharding_of(value, may_be_partial=True)
        gradients = REPLICATED if layout == PARTIAL else layout  # each term of a sum has the cotangent of the sum
        local = value.to_local(grad_placements=(gradients.placement(),))
    mesh, placements = group.mesh, (layout.placement(),)
    kind = dtensor_class()

    def build(children: list[torch.Tensor]) -> Any:
        (rebuilt,) = children
        if type(rebuilt) not in (torch.Tensor, torch.nn.Parameter):  # of a trace
            return ShardedValue(group, layout, rebuilt)
        return kind.from_local(rebuilt, mesh, placements, run_check=False)

    return [local], [".local"], (layout, group), build


def _call(function: Callable[..., Any], receiver: ShardedValue, *args: Any, **kwargs: Any) -> Any:
    return ShardedValue.apply(function, (receiver, *args), kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ShardedValue, *others: Any) -> Any:
        return ShardedValue.apply(getattr(torch.Tensor, name), (self, *others), {})

    return operate


def _refused(name: str) -> Callable[..., Any]:
    def operate(self: ShardedValue, *others: Any) -> Any:
        raise refuse("an operator on DTensors has no rule for a capture", got=name)

    return operate


def _refused_in_place(name: str) -> Callable[..., Any]:
    def operate(self: ShardedValue, other: Any) -> Any:
        raise refuse(f"an operator changes a DTensor in place: {name}", "one that returns another DTensor")

    return operate


# Without these, Python would take the object itself: `if x` would always hold, and `x += 1` would be `x = x + 1`.
for _name in (
    *("bool", "len", "iter", "eq", "ne", "lt", "le", "gt", "ge", "contains", "int", "float", "index"),
    *("getitem", "matmul", "rmatmul"),
):
    setattr(ShardedValue, f"__{_name}__", _refused(_name))
for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "imatmul"):
    setattr(ShardedValue, f"__{_name}__", _refused_in_place(_name))
for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _prefix in ("__", "__r"):
        setattr(ShardedValue, f"{_prefix}{_name}__", _operator(f"{_prefix}{_name}__"))
setattr(ShardedValue, "__neg__", _operator("__neg__"))  # noqa: B010  # mypy takes the class for a tensor's


def _scaled(shape: torch.Size, axis: int, factor: int) -> tuple[Any, ...]:
    return (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :])


def _with_first_at(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Move the first axis, along which collectives work, to `axis`."""
    return tensor.movedim(0, axis).contiguous() if axis else tensor


def _in_parts(tensor: torch.Tensor, axis: int, count: int) -> torch.Tensor:
    """Return a tensor with `axis` first, whose size the number of ranks must divide."""
    if tensor.shape[axis] % count:
        raise refuse("a dimension is sharded unevenly", f"a multiple of {count}", str(tensor.shape[axis]))
    return tensor.movedim(axis, 0)


def sharded_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[ShardedValue]:
    return [argument for argument in (*args, *kwargs.values()) if isinstance(argument, ShardedValue)]
