"""Apply autocast inside composite operators, as eager PyTorch does.

    einsum(a, b)  ──autocast──>  bmm(cast(a), cast(b))

Autocast casts the inputs of the operators on its list. A composite operator that is not on the list may call some that
are: eager PyTorch then casts inside it, and the dtype of its result may change. Functionalization misses this.
Such an operator is therefore decomposed with autocast on. One that must stay whole runs under autocast when the graph
runs. A recurrent layer has a definition: its inputs are cast before it if it computes in one dtype, otherwise it also
runs under autocast.
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


def composites_with_casts(program: ExportedProgram) -> set[Any]:
    """Return the composite operators of an export inside which autocast casts.

    Raises:
        CaptureError: such an operator is called inside a region where forward itself switches autocast on or off.
    """
    current = autocast_state()
    calls = list(_composite_calls(program.graph_module, current))
    states = {state for _, state in calls if state} | ({current} if current else set())
    casts_inside: dict[Any, bool] = {}
    casting: set[Any] = set()
    for node, _ in calls:
        for state in states:
            values = pytree.tree_leaves(map_arg((node.args, node.kwargs), lambda n: n.meta.get("val")))
            key = (node.target, state, *(v.dtype for v in values if isinstance(v, torch.Tensor)))
            if key not in casts_inside:
                casts_inside[key] = _casts_inside(node, state)
            if casts_inside[key]:
                casting.add(node.target)
    for node, state in calls:
        if node.target in casting and state != current:
            raise CaptureError(
                f"forward switches autocast around {node.target}, inside which autocast casts",
                where=source_location.of_node(node),
                expected=f"the same autocast state as around the module: {_as_text(current)}",
                got=_as_text(state),
                todo="the module runs in PyTorch; call the operator outside of forward's own autocast regions",
            )
    return casting


def _as_text(state: State) -> str:
    return ", ".join(sorted(f"{dtype} on {device}" for device, dtype in state)) or "off"


def hidden_casts(program: ExportedProgram, defined: Container[str]) -> dict[Any, Node]:
    """Return the defined operators of a functional graph inside which autocast still casts, and their first calls.

    PyTorch's decompositions may call such operators. One without a definition may stay: it runs under autocast.

    Args:
        program: the functional graph.
        defined: the names of the operators that have an ONNX definition.
    """
    casts = composites_with_casts(program) if autocast_state() else set()
    first_calls: dict[Any, Node] = {}
    for node in program.graph.nodes:
        if node.target in casts and str(node.target) in defined and str(node.target) not in RECURRENT:
            first_calls.setdefault(node.target, node)
    return first_calls


def refuse_hidden_casts(program: ExportedProgram, defined: Container[str]) -> None:
    """Refuse a functional graph that has hidden casts.

    Args:
        program: the functional graph.
        defined: the names of the operators that have an ONNX definition.

    Raises:
        UnsupportedOperatorError: the graph has hidden casts.
    """
    for target, node in hidden_casts(program, defined).items():
        raise UnsupportedOperatorError(
            f"autocast casts inside {target}, which the graph cannot express",
            where=source_location.of_node(node),
            todo="the module runs in PyTorch; use torch.matmul instead, or switch autocast off around the call",
        )


def declare_autocast_dtypes(program: ExportedProgram, kept: set[Any]) -> None:
    """Cast the results of operators that are not decomposed to the dtypes that they have under autocast.

    Functionalization would continue with the dtypes that they have without autocast. At run time these casts do
    nothing.

    Args:
        program: the export, changed in place.
        kept: the operators that are not decomposed.
    """
    current = autocast_state()
    for node, _ in list(_composite_calls(program.graph_module, current)):
        if node.target not in kept:
            continue
        dtypes = _dtypes_under(node, current)
        if str(node.target) in RECURRENT and computes_in_one_dtype(str(node.target), current):
            _cast_arguments(node, dtypes[0])
            continue
        has_several_results = isinstance(node.meta.get("val"), (tuple, list))
        for index, dtype in enumerate(dtypes):
            for result in [u for u in node.users if u.args[1] == index] if has_several_results else [node]:
                with node.graph.inserting_after(result):
                    cast = node.graph.call_function(TO_COPY.default, (result,), {"dtype": dtype})
                cast.meta = dict(result.meta)
                result.replace_all_uses_with(cast, delete_user_cb=partial(operator.is_not, cast))
        if node.graph.owning_module is not None:
            node.graph.owning_module.recompile()


def _cast_arguments(node: Node, dtype: torch.dtype) -> None:
    """Cast the floating-point arguments of a recurrent layer to `dtype`."""

    def cast(argument: Node) -> Node:
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return argument
        copy = node.graph.call_function(TO_COPY.default, (argument,), {"dtype": dtype})
        copy.meta = {**node.meta, "val": value.new_empty(value.shape, dtype=dtype)}
        return copy

    with node.graph.inserting_before(node):
        node.args = map_arg(node.args, cast)


def _dtypes_under(node: Node, state: State) -> list[torch.dtype]:
    """Run a call on zeros with autocast in this state, because not all kernels take fake tensors; return its dtypes."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: pytree.tree_map(_zeros, n.meta.get("val")))
    cuda = [torch.cuda.current_device()] if "cuda" in dict(state) else []
    with torch.random.fork_rng(cuda), torch.no_grad(), ExitStack() as stack:
        for device, dtype in state:
            stack.enter_context(torch.autocast(device, dtype, cache_enabled=False))
        return result_dtypes(node.target(*args, **kwargs))  # type: ignore[operator]  # an OpOverload


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    return torch.zeros(tuple(map(_zeros, value.shape)), dtype=value.dtype, device=value.device)


def with_autocast_inside(target: Any, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the decomposition of the composite operator `target` so that it runs under the current autocast state."""
    devices = [device for device, _ in _state_inside(target, autocast_state())]

    def decompose(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:  # at this dispatch level functionalization has switched autocast off
            for device in devices:
                for guard in autocast_inside_operators(device):
                    stack.enter_context(guard)
            return decomposition(*args, **kwargs)

    return decompose if devices else decomposition


def _composite_calls(module: GraphModule, state: State) -> Iterator[tuple[Node, State]]:
    """Yield the calls of composite operators, and the autocast state around each."""
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
    """Return whether autocast in this state has the operator on its list, and casts its inputs."""
    return isinstance(target, OpOverload) and _state_inside(target, state) != state


def _state_inside(target: Any, state: State) -> State:
    """Return the autocast state inside an operator: without the devices whose list has it, which cast its inputs."""
    return frozenset(s for s in state if not has_kernel_for_key(target.name(), f"Autocast{s[0].upper()}"))


class _CallRecorder(TorchDispatchMode):
    """Record the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def _casts_inside(node: Node, state: State) -> bool:
    """Return whether autocast changes which operators a call runs inside; True if it fails on fake tensors."""
    state = _state_inside(node.target, state)
    if not state or str(node.target) in RECURRENT:
        return bool(state)
    calls: list[list[str]] = []
    for tried in (state, frozenset()):
        try:
            with _on_fakes(node, tried) as (args, kwargs), _CallRecorder() as recorder:
                node.target(*args, **kwargs)  # type: ignore[operator]  # an OpOverload
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return True
        calls.append(recorder.called)
    return calls[0] != calls[1]


@contextmanager
def _on_fakes(node: Node, state: State) -> Iterator[tuple[Any, Any]]:
    """Enter this autocast state, without adding guards or symbols, and yield the fake arguments of a call."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    modes = [v.fake_mode for v in pytree.tree_leaves((args, kwargs)) if hasattr(v, "fake_mode")]
    with ExitStack() as stack:
        stack.enter_context(autocast(state))
        for mode in modes[:1]:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        yield args, kwargs


@contextmanager
def autocast(state: State) -> Iterator[None]:
    """Enter an autocast state: on for its devices, off for the others."""
    dtypes = dict(state)
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            is_on = device in dtypes
            if is_on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtypes.get(device), enabled=is_on, cache_enabled=False))
        yield


def result_dtypes(results: Any) -> list[torch.dtype]:
    """Return the dtypes of the tensors among the results of a call."""
    return [r.dtype for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
