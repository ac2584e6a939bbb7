"""Select by a boolean mask whose elements the trace knows as a selection at positions.

    x[torch.tensor([True, False, True])]        traced as x[torch.tensor([0, 2])]

The number of elements that a mask selects is data-dependent for PyTorch's tracing, even if the mask is a constant of
the code: `x[mask].view(2, 3)` could not be captured. A mask is known if only constants that forward makes, and pure
operators on them, lead to it; no argument, parameter, buffer or tensor from outside, which may change between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_arg

from onnxtrain.capture.guards.known_values import known_values
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.tracing import traced_node

_MAX_ELEMENTS = 1 << 16  # the positions become constants of the graph
_MAX_NODES = 32
_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
_DETACH = torch.ops.aten.detach_.default  # of torch.tensor: it changes no element


def _getitem(original: Callable[..., Any], x: torch.Tensor, index: Any) -> Any:
    return original(x, _with_positions(x, index))


def _nonzero(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    positions = None if "out" in kwargs else _positions(x)
    if positions is None:
        return original(x, *args, **kwargs)
    if kwargs.get("as_tuple", args[0] if args else False):
        return positions
    return torch.stack(positions, 1)


def _where(original: Callable[..., Any], condition: Any, *args: Any, **kwargs: Any) -> Any:
    positions = None if args or kwargs else _positions(condition)
    return original(condition, *args, **kwargs) if positions is None else positions


def _setitem(original: Callable[..., Any], x: torch.Tensor, index: Any, value: Any) -> None:
    original(x, _with_positions(x, index), value)


REPLACEMENTS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: _getitem,
    torch.Tensor.__setitem__: _setitem,
    torch.Tensor.nonzero: _nonzero,
    torch.nonzero: _nonzero,
    torch.where: _where,
}


def _with_positions(x: torch.Tensor, index: Any) -> Any:
    """Return an index with the positions of each known mask in place of the mask, if their shapes agree."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(_is_mask(item) for item in items):
        return index
    replaced: list[Any] = []
    for k, item in enumerate(items):
        positions = _positions(item) if _is_mask(item) else None
        if positions is None or not _fits(x, items, k):
            replaced.append(item)
        else:
            replaced += positions
    return tuple(replaced)


def _is_mask(item: Any) -> bool:
    return isinstance(item, FakeTensor) and item.dtype == torch.bool and item.dim() > 0


def _fits(x: torch.Tensor, items: Sequence[Any], k: int) -> bool:
    """Return whether mask `k` of an index has the sizes of the axes that it selects from; if not, PyTorch raises."""
    widths = [_width(item) for item in items]
    total = sum(widths)
    ellipses = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1 or total > x.dim():
        return False
    first = sum(widths[:k]) + (x.dim() - total if ellipses and ellipses[0] < k else 0)
    return all(x.shape[first + d] == size for d, size in enumerate(items[k].shape))


def _width(item: Any) -> int:
    """Return the number of axes that an item of an index takes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _positions(mask: Any) -> tuple[torch.Tensor, ...] | None:
    """Return the coordinates of a known tensor's nonzero elements, one constant for each axis; None if unknown."""
    value = _value(mask) if isinstance(mask, FakeTensor) and mask.dim() else None
    if value is None:
        return None
    coordinates = _outside_the_trace(lambda: value.nonzero().t().tolist())
    return tuple(torch.tensor(axis, dtype=torch.int64, device=mask.device) for axis in coordinates)


def _value(tensor: FakeTensor) -> torch.Tensor | None:
    """Compute the elements of a traced tensor from constants; None if they depend on anything else."""
    known = known_values()
    if known is not None:
        return known.constant(tensor)
    mode, computing = get_proxy_mode(), traced_node(tensor)
    if mode is None or computing is None or any(type(size) is not int for size in tensor.shape):
        return None
    nodes = _constant_nodes(computing)
    if nodes is None or tensor.numel() > _MAX_ELEMENTS or _may_be_written(nodes):
        return None
    root = getattr(mode.tracer, "root", None)

    def compute() -> torch.Tensor:
        values: dict[Any, Any] = {}
        for node in nodes:
            if node.op == "get_attr":
                values[node] = getattr(root, str(node.target))
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                assert callable(node.target)
                values[node] = values[node.args[0]] if node.target is _DETACH else node.target(*args, **kwargs)
        result: torch.Tensor = values[computing]
        return result

    value: torch.Tensor = _outside_the_trace(compute)
    return value


def _constant_nodes(node: Node) -> list[Node] | None:
    """Return the nodes that compute `node`, in order, if they are constants that forward makes and pure operators."""
    ordered: dict[Node, None] = {}
    worklist = [node]
    while worklist:
        current = worklist[-1]
        missing = [source for source in current.all_input_nodes if source not in ordered]
        if missing:
            worklist += missing
        else:
            ordered[worklist.pop()] = None
        if len(worklist) + len(ordered) > _MAX_NODES:
            return None
    return list(ordered) if all(map(_is_constant, ordered)) else None


def _is_constant(node: Node) -> bool:
    if node.op == "get_attr":  # without a lift it is a tensor from outside
        return all(user.target in _LIFTS for user in node.users)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return node.target is _DETACH or not (
        torch.Tag.nondeterministic_seeded in node.target.tags or schema_of(node.target).is_mutable
    )


def _may_be_written(nodes: Sequence[Node]) -> bool:
    """Return whether forward has changed one of these tensors in place so far, directly or through a view."""
    worklist, visited = list(nodes), set(nodes)
    while worklist:
        for user in worklist.pop().users:
            if user in visited:
                continue
            if not isinstance(user.target, OpOverload):
                return True
            schema = schema_of(user.target)
            if user.target is not _DETACH and any(map(visited.__contains__, _written(user, schema))):
                return True
            if any(result.alias_info for result in schema.returns):
                visited.add(user)
                worklist.append(user)
    return False


def _written(node: Node, schema: Any) -> Iterator[Any]:
    """Yield the arguments that an operator changes in place."""
    for position, argument in enumerate(schema.arguments):
        if argument.is_write:
            yield node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)


def _outside_the_trace(compute: Callable[[], Any]) -> Any:
    """Compute on another thread, where the modes of the trace are not active."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(compute).result()
