"""The values, in the call that is captured, of tensors that forward computes from integer inputs and from constants.

    for t, h, w in grid_thw.tolist():           reads the elements of an input as Python numbers: it becomes fixed
        index = torch.arange(h * w)[mask]       computed from constants and fixed inputs: a constant of the graph

A graph whose capture fixes an input is valid for calls in which that input has the same elements (`FixedInput`).

The recorded operators run once more, in the order of the trace and on real tensors, so that changes in place are
repeated, too. Each result knows the inputs and the sizes of inputs that it depends on. Parameters, buffers, tensors
from outside and random numbers have no known value, and neither has a result that depends on one.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg

from onnxtrain.capture import source_location
from onnxtrain.capture.guards.traced_graph import traced_nodes
from onnxtrain.capture.node_storage import example_size
from onnxtrain.ops.python_function.run_context import untraced
from onnxtrain.torch_compat.aten_operators import TO_COPY
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.pytree import tree_leaves
from onnxtrain.torch_compat.symbols import is_data_dependent
from onnxtrain.torch_compat.tensors import storage_id

_ATEN = torch.ops.aten
_MAX_ELEMENTS = 1 << 20  # of a known value
_MAX_FIXED = 1 << 16  # of a fixed input, which each call compares
_LIFTS = (_ATEN.lift_fresh_copy.default, _ATEN.lift_fresh.default)
_DETACH = _ATEN.detach_.default  # of torch.tensor: it changes no element
# Besides views: each element of the result is one of the argument.
_SELECTIONS = frozenset({
    *_LIFTS, _DETACH, _ATEN.index.Tensor, _ATEN.clone.default, _ATEN.contiguous.default, TO_COPY.default,
    _ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.to.device, _ATEN.to.other, _ATEN.floor_divide.default,
    _ATEN.floor_divide.Scalar, operator.getitem,
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class FixedInput:
    """An input whose elements forward has read as Python numbers, which are constants of the graph.

    Attributes:
        index: of the input.
        value: its value in the captured call.
        where: the source location of the first read.
        answer: its shape and elements.
    """

    index: int
    value: torch.Tensor
    where: str
    answer: tuple[Any, ...]
    lifted: tuple[Any, ...] = ()
    is_number = True

    def is_same(self, other: Any) -> bool:
        """Return whether another decision fixes the same input to the same elements."""
        return isinstance(other, FixedInput) and (self.index, self.answer) == (other.index, other.answer)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the input has the same elements."""
        return torch.equal(tensors[self.index], self.value)


@dataclass
class _Origin:
    """What the tensors of one memory, or a number, depend on.

    Attributes:
        inputs: the indices of the inputs whose elements determine them.
        sizes: the sizes of inputs that determine them, by expression.
        is_known: whether nothing unknown has been written to them.
    """

    inputs: set[int] = field(default_factory=set)
    sizes: dict[Any, torch.SymInt] = field(default_factory=dict)
    is_known: bool = True

    def add(self, other: _Origin) -> None:
        self.inputs |= other.inputs
        self.sizes.update(other.sizes)


@dataclass(frozen=True)
class _Known:
    """The value of a node.

    Attributes:
        value: a tensor, a number, or a list of them.
        origin: what it depends on.
        is_selection: whether its elements are elements of inputs.
    """

    value: Any
    origin: _Origin
    is_selection: bool = False


class KnownValues:
    """The values of one trace.

    Args:
        tensors: the inputs of the call.
        traced: the same inputs in the trace.
        fixed: the inputs that are fixed from the beginning of the trace.

    Attributes:
        fixed: the fixed inputs, by index.
        has_fixed: whether forward has read elements of further inputs in this trace.
        reads: the number of values that forward has got.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], traced: Sequence[torch.Tensor], fixed: Iterable[FixedInput] = ()
    ) -> None:
        self.fixed = {each.index: each for each in fixed}
        self.has_fixed = False
        self.reads = 0
        self._tensors = tensors
        self._traced = traced
        self._nodes = traced_nodes(traced)
        self._values: dict[Node, _Known] = {}
        self._origins: dict[int, _Origin] = {}  # by storage
        self._last: Node | None = None
        for index in self.fixed:
            self._fix_shape(index)

    def constant(self, tensor: Any) -> torch.Tensor | None:
        """Return the value of a traced tensor if it depends only on constants and fixed inputs, else None."""
        known = self._find(tensor)
        return None if known is None or known.origin.inputs - self.fixed.keys() else self._use(known)

    def read(self, tensor: Any) -> torch.Tensor | None:
        """Return the value of a traced tensor that forward reads as Python numbers; None if it is not known.

        Inputs of which these numbers are elements become fixed.
        """
        known = self._find(tensor)
        if known is None:
            return None
        missing = known.origin.inputs - self.fixed.keys()
        if (missing and not known.is_selection) or any(self._tensors[i].numel() > _MAX_FIXED for i in missing):
            return None
        for index in sorted(missing):
            self._fix(index)
        return self._use(known)

    def _find(self, tensor: Any) -> _Known | None:
        mode = get_proxy_mode()
        if mode is None or not isinstance(tensor, FakeTensor):
            return None
        (node,) = traced_nodes([tensor])
        if node is None:
            return None
        with untraced(), torch.no_grad():
            self._continue(node.graph, mode.tracer)
        known = self._values.get(node)
        return known if known is not None and known.origin.is_known else None

    def _use(self, known: _Known) -> torch.Tensor:
        for size in known.origin.sizes.values():
            int(size)  # the graph is for this size
        self.reads += 1
        value: torch.Tensor = known.value
        return value

    def _fix(self, index: int) -> None:
        self.has_fixed = True
        self._fix_shape(index)
        with untraced():
            value = self._tensors[index].detach().clone()
            answer = (*value.shape, *value.flatten().tolist())
        self.fixed[index] = FixedInput(index, value, source_location.of_caller() or "", answer)

    def _fix_shape(self, index: int) -> None:
        for size in self._traced[index].shape:
            int(size)

    # Running the operators

    def _continue(self, graph: torch.fx.Graph, tracer: Any) -> None:
        """Run the operators that the trace has recorded since the last time."""
        if self._last is None:
            for index, node in enumerate(self._nodes):
                self._add_input(node, index)
        for node in iter(graph.nodes) if self._last is None else _following(self._last):
            self._last = node
            known = self._run(node, getattr(tracer, "root", None)) if node.op == "call_function" else None
            if known is not None:
                self._values[node] = known

    def _add_input(self, node: Node | None, index: int) -> None:
        tensor = self._tensors[index]
        is_small = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() <= _MAX_ELEMENTS
        if node is not None and is_small and not (tensor.is_floating_point() or tensor.is_complex()):
            value = tensor.detach().clone()
            origin = self._origins[storage_id(value)] = _Origin({index})
            self._values[node] = _Known(value, origin, is_selection=True)

    def _run(self, node: Node, root: Any) -> _Known | None:
        """Return the value of a node; None if it is not known."""
        expected = node.meta.get("val")
        if isinstance(expected, int | float):
            return _Known(expected, _Origin())
        if isinstance(expected, torch.SymInt) and not any(map(is_data_dependent, expected.node.expr.free_symbols)):
            return _Known(expected.node.hint, _Origin(sizes={expected.node.expr: expected}))
        if node.target in _LIFTS:
            constant = _constant(node.args[0], root)
            return None if constant is None else self._known(constant, [], is_selection=True)
        parts = [self._values.get(part) for part in node.all_input_nodes]
        known = [part for part in parts if part is not None and part.origin.is_known]
        result = None
        if len(known) == len(parts) and _is_deterministic(node.target) and _is_small(expected):
            args, kwargs = map_arg((node.args, node.kwargs), lambda part: self._values[part].value)
            try:
                result = args[0] if node.target is _DETACH else node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:  # noqa: BLE001  # an operator may raise anything; the trace goes on without its value
                result = None
        if result is None:
            self._forget_written(node)
            return None
        return self._known(
            result, known, is_selection=_selects(node.target, result) and all(k.is_selection for k in known)
        )

    def _known(self, value: Any, parts: Sequence[_Known], *, is_selection: bool) -> _Known:
        """Return the value of an operator's result with what it depends on; the tensors of a memory share that."""
        storages = {storage_id(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
        origins = [self._origins[storage] for storage in storages if storage in self._origins]
        origin = origins[0] if origins else _Origin()
        for other in (*origins[1:], *(part.origin for part in parts)):
            origin.add(other)
        self._origins.update(dict.fromkeys(storages - self._origins.keys(), origin))
        return _Known(value, origin, is_selection)

    def _forget_written(self, node: Node) -> None:
        """Forget the values of tensors whose memory a node changes, as their new elements are not known."""
        for part in tree_leaves(_written(node)):
            if part in self._values:
                self._values[part].origin.is_known = False


_Thread = type("_Thread", (threading.local,), {"values": None})
_THREAD: Any = _Thread()


@contextmanager
def knowing(values: KnownValues | None) -> Iterator[None]:
    """Let `known_values()` return these values on this thread."""
    outer, _THREAD.values = _THREAD.values, values
    try:
        yield
    finally:
        _THREAD.values = outer


def known_values() -> KnownValues | None:
    """Return the values of the running trace; None if it fixes no inputs."""
    values: KnownValues | None = _THREAD.values
    return values


def _following(node: Node) -> Iterator[Node]:
    while node.next.op != "root":
        node = node.next
        yield node


def _constant(lifted: Any, root: Any) -> torch.Tensor | None:
    """Return a copy of the constant of forward that a node lifts."""
    value = getattr(root, str(lifted.target), None) if lifted.op == "get_attr" else None
    value = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
    return value.clone() if type(value) is torch.Tensor and value.numel() <= _MAX_ELEMENTS else None


def _is_deterministic(target: Any) -> bool:
    if isinstance(target, OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and target.namespace == "aten"
    return getattr(target, "__module__", "") in ("_operator", "math")


def _is_small(expected: Any) -> bool:
    """Return whether the tensors of a traced result are; one whose size depends on elements may be."""
    tensors = [leaf for leaf in tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
    return all(math.prod(map(example_size, t.shape)) <= _MAX_ELEMENTS for t in tensors)


def _written(node: Node) -> list[Any]:
    """Return the arguments that a node may change in place."""
    if not isinstance(node.target, OpOverload):
        return [] if _is_deterministic(node.target) else node.all_input_nodes
    positional = [a for a, s in zip(node.args, schema_of(node.target).arguments, strict=False) if s.is_write]
    return [*positional, *(node.kwargs.get(s.name) for s in schema_of(node.target).arguments if s.is_write)]


def _selects(target: Any, value: Any) -> bool:
    """Return whether each element of a result is determined by one element of each argument, and not only its sign."""
    if target in _SELECTIONS:
        return True
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return False
    if any(result.alias_info for result in schema_of(target).returns):
        return True
    is_integer = isinstance(value, torch.Tensor) and value.dtype != torch.bool and not value.is_floating_point()
    return torch.Tag.pointwise in target.tags and is_integer
