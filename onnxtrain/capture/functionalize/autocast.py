"""Composite operators under autocast.

    einsum(a, b)  ──autocast──>  bmm(cast(a), cast(b))        so does eager PyTorch

Autocast casts the inputs of the operators on its list. A composite operator that is not on it may call some that are:
eager PyTorch then casts inside it, and its result may have another element type. Functionalization does not see that.
So such an operator is taken apart with autocast on; one that stays whole runs under autocast when the graph runs. A
recurrent layer has a definition: where it computes in one type, what it reads is cast before it; else it runs so too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from onnxtrain.capture import source_location
from onnxtrain.errors import CaptureError, UnsupportedOperatorError
from onnxtrain.ops.aten_node import AutocastState as State
from onnxtrain.ops.aten_node import autocast_state, is_composite
from onnxtrain.ops.recurrent.capture import OPERATORS as RECURRENT
from onnxtrain.ops.recurrent.capture import computes_in_one_dtype
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import TO_COPY
from onnxtrain.torch_compat.dispatch import has_kernel_for_key
from onnxtrain.torch_compat.modes import TorchDispatchMode, autocast_inside_operators
from onnxtrain.torch_compat.operators import OpOverload


def casting_composites(program: ExportedProgram) -> set[Any]:
    """The composite operators of an export inside which autocast casts.

    Raises:
        CaptureError: such an operator is called where forward itself has switched autocast on or off.
    """
    now = autocast_state()
    calls = list(_composite_calls(program.graph_module, now))
    states = {state for _, state in calls if state} | ({now} if now else set())
    known: dict[Any, bool] = {}
    casting: set[Any] = set()
    for node, _ in calls:
        for state in states:
            values = pytree.tree_leaves(map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
            key = (node.target, state, *(v.dtype for v in values if isinstance(v, torch.Tensor)))
            if key not in known:
                known[key] = _casts_inside(node, state)
            if known[key]:
                casting.add(node.target)
    for node, state in calls:
        if node.target in casting and state != now:
            raise CaptureError(
                f"forward switches autocast around {node.target}, inside which autocast casts",
                where=source_location.of_node(node),
                todo="the module runs in PyTorch; call it where autocast is as around the whole module",
            )
    return casting


def hidden_casts(program: ExportedProgram, defined: Container[str]) -> dict[Any, Node]:
    """The operators of a functional graph inside which autocast still casts, and the first call of each.

    One that is not `defined` may stay: it runs under autocast.
    """
    casts = casting_composites(program) if autocast_state() else set()
    found: dict[Any, Node] = {}
    for node in program.graph.nodes:
        if node.target in casts and str(node.target) in defined and str(node.target) not in RECURRENT:
            found.setdefault(node.target, node)
    return found


def refuse_hidden_casts(program: ExportedProgram, defined: Container[str]) -> None:
    """Raises UnsupportedOperatorError where a functional graph still holds an operator inside which autocast casts."""
    for target, node in hidden_casts(program, defined).items():
        raise UnsupportedOperatorError(
            f"autocast casts inside {target}, which the graph cannot say",
            where=source_location.of_node(node),
            todo="the module runs in PyTorch; write it with torch.matmul, or call it with autocast switched off",
        )


def state_types(program: ExportedProgram, whole: set[Any]) -> None:
    """Casts the results of operators that stay whole to the types that they have under autocast.

    Functionalization would go on with the types that they have without it. When the graph runs, nothing is to be cast.
    """
    now = autocast_state()
    for node, _ in list(_composite_calls(program.graph_module, now)):
        if node.target not in whole:
            continue
        dtypes = _dtypes_under(node, now)
        if str(node.target) in RECURRENT and computes_in_one_dtype(str(node.target), now):
            _cast_arguments(node, dtypes[0])
            continue
        several = isinstance(node.meta.get("val"), (tuple, list))
        for index, dtype in enumerate(dtypes):
            for result in [u for u in node.users if u.args[1] == index] if several else [node]:
                with node.graph.inserting_after(result):
                    cast = node.graph.call_function(TO_COPY.default, (result,), {"dtype": dtype})
                cast.meta = dict(result.meta)
                result.replace_all_uses_with(cast, delete_user_cb=partial(operator.is_not, cast))
        if node.graph.owning_module is not None:
            node.graph.owning_module.recompile()


def _cast_arguments(node: Node, dtype: torch.dtype) -> None:
    """Casts what a recurrent layer reads."""

    def cast(argument: Node) -> Node:
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return argument
        made = node.graph.call_function(TO_COPY.default, (argument,), {"dtype": dtype})
        made.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=dtype)}
        return made

    with node.graph.inserting_before(node):
        node.args = map_arg(node.args, cast)


def _dtypes_under(node: Node, state: State) -> list[torch.dtype]:
    """The types of a call's results with autocast in this state, on zeros: not all kernels take fake tensors."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: pytree.tree_map(_zeros, n.meta.get("val")))
    cuda = [torch.cuda.current_device()] if "cuda" in dict(state) else []
    with torch.random.fork_rng(cuda), torch.no_grad(), ExitStack() as stack:
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        return _dtypes(node.target(*args, **kwargs))  # type: ignore[operator]  # an OpOverload


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(tuple(map(_zeros, value.shape)), dtype=value.dtype, device=value.device)


def casting(target: Any, parts: Callable[..., Any]) -> Callable[..., Any]:
    """`parts`, which take the composite operator `target` apart, with autocast on inside as it is now."""
    devices = [device for device, _ in _unlisted(target, autocast_state())]

    def cast_parts(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:  # functionalization has switched it off at this depth
            for device in devices:
                for guard in autocast_inside_operators(device):
                    stack.enter_context(guard)
            return parts(*args, **kwargs)

    return cast_parts if devices else parts


def _composite_calls(module: GraphModule, state: State) -> Iterator[tuple[Node, State]]:
    """The calls of composite operators, and the state of autocast around each."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        inner = state
        if getattr(node.target, "__name__", "") == "wrap_with_autocast":
            device, dtype, enabled = node.args[:3]
            inner = frozenset(s for s in state if s[0] != device)
            if enabled:
                inner |= {(device, dtype or torch.get_autocast_dtype(device))}
        for argument in node.all_input_nodes:  # the bodies of such regions
            body = getattr(module, str(argument.target), None) if argument.op == "get_attr" else None
            if isinstance(body, GraphModule):
                yield from _composite_calls(body, inner)
        if isinstance(node.target, OpOverload) and is_composite(node.target):
            yield node, state


def is_listed(target: Any, state: State) -> bool:
    """Whether an operator is on the list of autocast in this state, which then casts before it."""
    return isinstance(target, OpOverload) and _unlisted(target, state) != state


def _unlisted(target: Any, state: State) -> State:
    """Of a state, what is not on autocast's own list for this operator: there it casts before, and not inside."""
    return frozenset(s for s in state if not has_kernel_for_key(target.name(), f"Autocast{s[0].upper()}"))


class _Names(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def _casts_inside(node: Node, state: State) -> bool:
    """Whether autocast changes what a call does inside. Taken to be so where fake tensors do not tell."""
    state = _unlisted(node.target, state)
    if not state or str(node.target) in RECURRENT:
        return bool(state)
    called: list[list[str]] = []
    for around in (state, frozenset()):
        try:
            with _on_fakes(node, around) as (args, kwargs), _Names() as names:
                node.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return True
        called.append(names.called)
    return called[0] != called[1]


@contextmanager
def _on_fakes(node: Node, state: State) -> Iterator[tuple[Any, Any]]:
    """The fake arguments of a call, with autocast in this state, and no trace left in the record of sizes."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    modes = [v.fake_mode for v in pytree.tree_leaves((args, kwargs)) if hasattr(v, "fake_mode")]
    on = dict(state)
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if device in on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, on.get(device), enabled=device in on, cache_enabled=False))
        for mode in modes[:1]:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield args, kwargs


def _dtypes(results: Any) -> list[torch.dtype]:
    return [r.dtype for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
