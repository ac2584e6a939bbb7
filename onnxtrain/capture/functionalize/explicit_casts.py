"""The casts that autocast makes before an operator, for exports that are converted without functionalization.

    linear(x, w, b)  ──autocast──>  linear(_to_copy(x), _to_copy(w), _to_copy(b))

Which arguments are cast is not written down here: each operator that autocast knows is run on fake tensors, once for
each combination of types. It has to cast some of its arguments and then call what it calls without autocast on such
arguments; any other is left to PyTorch (a softmax that gets another `dtype`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from onnxtrain.capture.functionalize.autocast import is_listed
from onnxtrain.ops.aten_node import AutocastState as State
from onnxtrain.ops.recurrent.capture import OPERATORS as RECURRENT
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import TO_COPY
from onnxtrain.torch_compat.fake_tensors import FakeTensor, FakeTensorMode
from onnxtrain.torch_compat.modes import TorchDispatchMode

CAST = TO_COPY.default
Casts = list[tuple[int, torch.dtype]]  # the places of arguments among the nodes that a call is given, in order


class ExplicitCasts:
    """What autocast in one state casts."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._known: dict[Any, Casts | None] = {}

    def before(self, node: Node) -> Casts | None:
        """The casts of a call's arguments; None where that is not all that autocast does."""
        if not self._state or not is_listed(node.target, self._state):
            return []
        if str(node.target) in RECURRENT:
            return None
        key = (node.target, *map(_kind, pytree.tree_leaves((node.args, dict(node.kwargs)))))
        if key not in self._known:
            self._known[key] = self._found(node)
        return self._known[key]

    def _found(self, node: Node) -> Casts | None:
        try:
            given, values = _on_fakes(node)
            cast = _Calls(node, given, self._state)
            found: Casts = []
            for value, dtype in cast.first:
                taken = {place for place, _ in found}
                place = next(i for i, v in enumerate(values) if v is value and i not in taken)
                found.append((place, dtype))
            to = dict(found)
            then = _Calls(node, _on_fakes(node, to)[0], frozenset())
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return None
        is_same = then.made == cast.made[len(cast.first) :] and then.dtypes == cast.dtypes == _dtypes(node.meta["val"])
        return found if is_same else None


class _Calls(TorchDispatchMode):
    """The operators that a call of a node calls.

    Attributes:
        made: their names, and the types of their results.
        first: the arguments that are cast before all others, and to what.
        dtypes: those of the results.
    """

    def __init__(self, node: Node, given: Any, state: State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.made: list[tuple[str, list[torch.dtype]]] = []
        self.first: list[tuple[torch.Tensor, torch.dtype]] = []
        self._given = [value for value in pytree.tree_leaves(given) if isinstance(value, FakeTensor)]
        on = dict(state)
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if device in on or torch.is_autocast_enabled(device):
                    autocast = torch.autocast(device, on.get(device), enabled=device in on, cache_enabled=False)
                    stack.enter_context(autocast)
            stack.enter_context(self._given[0].fake_mode)
            stack.enter_context(self)
            args, kwargs = given
            self.dtypes = _dtypes(node.target(*args, **kwargs))  # type: ignore[operator]  # an OpOverload

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":  # a question, as that for the device
            return result
        if func is CAST and len(self.first) == len(self.made) and any(args[0] is value for value in self._given):
            self.first.append((args[0], result.dtype))
        self.made.append((str(func), _dtypes(result)))
        return result


def _on_fakes(node: Node, to: dict[int, torch.dtype] | None = None) -> tuple[Any, list[Any]]:
    """The arguments of a call, of the sizes that they have now and perhaps of other types; and those that are nodes."""
    mode = FakeTensorMode()
    made: dict[tuple[Node, torch.dtype | None], Any] = {}
    values: list[Any] = []

    def value(argument: Node) -> Any:
        key = (argument, (to or {}).get(len(values)))
        if key not in made:
            made[key] = pytree.tree_map(lambda v: _fake(mode, v, key[1]), argument.meta["val"])
        values.append(made[key])
        return made[key]

    given = map_arg((node.args, node.kwargs), value)
    return given, values


def _fake(mode: FakeTensorMode, value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        sizes = [_fake(mode, size, None) for size in value.shape]
        return torch.empty(sizes, dtype=dtype or value.dtype, device=value.device)


def cast_value(value: Any, dtype: torch.dtype) -> Any:
    """A fake tensor in another type, made in its own mode."""
    with value.fake_mode:
        return CAST(value, dtype=dtype)


def _kind(leaf: Any) -> Any:
    value = leaf.meta.get("val") if isinstance(leaf, Node) else leaf
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type, value.dim()
    return str(value) if type(value) in (bool, int, float, str, type(None), torch.dtype) else type(value)


def _dtypes(results: Any) -> list[torch.dtype]:
    return [r.dtype for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
