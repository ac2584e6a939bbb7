"""Make autocast's casts before an operator explicit, for exports that are converted without functionalization.

    linear(x, w, b)  ──autocast──>  linear(_to_copy(x), _to_copy(w), _to_copy(b))

PyTorch itself tells which arguments are cast: each operator on autocast's list runs once on fake tensors for each
combination of dtypes. If it casts some arguments, and then calls the same operators as it calls without autocast on
cast arguments, the casts are all that autocast does. Otherwise (a softmax that gets another `dtype`) the export is left
to PyTorch's functionalization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from onnxtrain.capture.functionalize.autocast import autocast, is_listed, result_dtypes
from onnxtrain.ops.aten_node import AutocastState as State
from onnxtrain.ops.recurrent.capture import OPERATORS as RECURRENT
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import TO_COPY
from onnxtrain.torch_compat.fake_tensors import FakeTensor, FakeTensorMode
from onnxtrain.torch_compat.modes import TorchDispatchMode

CAST = TO_COPY.default
Casts = list[tuple[int, torch.dtype]]  # positions among the call's arguments that are nodes, and the new dtypes


class ExplicitCasts:
    """The casts of one autocast state, found by running operators on fake tensors."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._cached: dict[Any, Casts | None] = {}

    def before(self, node: Node) -> Casts | None:
        """Return the casts of a call's arguments; None if autocast does more than cast them."""
        if not self._state or not is_listed(node.target, self._state):
            return []
        if str(node.target) in RECURRENT:
            return None
        key = (node.target, *map(_argument_key, pytree.tree_leaves((node.args, dict(node.kwargs)))))
        if key not in self._cached:
            self._cached[key] = self._find_casts(node)
        return self._cached[key]

    def _find_casts(self, node: Node) -> Casts | None:
        try:
            arguments, values = _fake_arguments(node)
            with_autocast = _CallRecorder(node, arguments, self._state)
            casts: Casts = []
            for value, dtype in with_autocast.casts:
                positions = {position for position, _ in casts}
                position = next(i for i, v in enumerate(values) if v is value and i not in positions)
                casts.append((position, dtype))
            without = _CallRecorder(node, _fake_arguments(node, dict(casts))[0], frozenset())
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return None
        is_same = without.calls == with_autocast.calls[len(with_autocast.casts) :]
        return casts if is_same and without.dtypes == with_autocast.dtypes == result_dtypes(node.meta["val"]) else None


class _CallRecorder(TorchDispatchMode):
    """Run a node's call under an autocast state, and record the operators that it calls.

    Args:
        node: the call.
        arguments: its positional and keyword arguments on fake tensors.
        state: the autocast state.

    Attributes:
        calls: the names of the called operators, and the dtypes of their results.
        casts: the arguments that are cast before all other calls, and their new dtypes.
        dtypes: the dtypes of the node's results.
    """

    def __init__(self, node: Node, arguments: Any, state: State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.calls: list[tuple[str, list[torch.dtype]]] = []
        self.casts: list[tuple[torch.Tensor, torch.dtype]] = []
        self._tensors = [value for value in pytree.tree_leaves(arguments) if isinstance(value, FakeTensor)]
        with autocast(state), self._tensors[0].fake_mode, self:
            args, kwargs = arguments
            self.dtypes = result_dtypes(node.target(*args, **kwargs))  # type: ignore[operator]  # an OpOverload

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a query, such as for the device
            return result
        if func is CAST and len(self.casts) == len(self.calls) and any(args[0] is t for t in self._tensors):
            self.casts.append((args[0], result.dtype))
        self.calls.append((str(func), result_dtypes(result)))
        return result


def _fake_arguments(node: Node, new_dtypes: dict[int, torch.dtype] | None = None) -> tuple[Any, list[Any]]:
    """Make fake arguments for a call, of the example's sizes.

    Args:
        node: the call.
        new_dtypes: dtypes for some of the arguments that are nodes, by position among these.

    Returns:
        The positional and keyword arguments, and the values of those that are nodes.
    """
    mode = FakeTensorMode()
    fakes: dict[tuple[Node, torch.dtype | None], Any] = {}
    values: list[Any] = []

    def value(argument: Node) -> Any:
        key = (argument, (new_dtypes or {}).get(len(values)))
        if key not in fakes:
            fakes[key] = pytree.tree_map(lambda v: _fake(mode, v, key[1]), argument.meta["val"])
        values.append(fakes[key])
        return fakes[key]

    arguments = map_arg((node.args, node.kwargs), value)
    return arguments, values


def _fake(mode: FakeTensorMode, value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        sizes = [_fake(mode, size, None) for size in value.shape]
        return torch.empty(sizes, dtype=dtype or value.dtype, device=value.device)


def cast_value(value: Any, dtype: torch.dtype) -> Any:
    """Cast a fake tensor in its own mode."""
    with value.fake_mode:
        return CAST(value, dtype=dtype)


def _argument_key(leaf: Any) -> Any:
    value = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type, value.dim()
    return str(value) if type(value) in (bool, int, float, str, type(None), torch.dtype) else type(value)
