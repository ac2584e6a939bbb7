"""The gradient of an operator without a definition, traced from PyTorch's own autograd on fake tensors.

    y = ATen(a, b) [linalg_solve]     dy ──>  ATen [linalg_solve], Mul, ReduceSum, … ──> da, db

The operator is run under autograd, its gradient taken, and each call that autograd makes becomes what it would become
in forward: a definition of ours where there is one, else an ATen node. What forward computed already is read there.

A trace must be right at all sizes at which the operator runs. It is refused, and the node runs under autograd at run
time, where PyTorch decided anything from sizes on the way, where a size of 1 would change a shape, where random numbers
would be drawn again, and where fake tensors do not suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from onnxtrain.capture.export.patches import CAPTURE_LOCK
from onnxtrain.capture.export.torch_reports import reports_dropped
from onnxtrain.capture.functionalize.composite_operators import size_decisions
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.builder import Builder
from onnxtrain.log import LOG
from onnxtrain.ops import definition_of
from onnxtrain.ops.aten_node import AtenCall, aten_call, is_composite
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import CONJ
from onnxtrain.torch_compat.decompositions import enable_python_dispatcher
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode, FunctionalTensorMode, dispatch_functionalize
from onnxtrain.torch_compat.modes import autocast_disabled
from onnxtrain.torch_compat.operators import OpOverload, schema_of

Flags = tuple[bool, ...]
# (builder, traced module, what its nodes are that are known already) -> the module's outputs
Inline = Callable[[Builder, GraphModule, Mapping[Node, Any]], list[Any]]


class Refused(Exception):  # noqa: N818  # caught here: the reason for which a trace is not used
    """The trace would not be right at all sizes."""


@dataclass(frozen=True)
class _Trace:
    """A traced gradient.

    Attributes:
        module: (tensors, sizes, cotangents that are given) -> gradients of the active tensors, or None.
        forward: the nodes that repeat the operator itself.
    """

    module: GraphModule
    forward: tuple[Node, ...]


class TracedGradient:
    """The gradient of one ATen node, traced once per pattern of active tensors and given cotangents.

    Args:
        tensors: fake tensors in the place of the node's tensors.
        sizes: PyTorch's symbolic sizes in the place of the node's sizes.
        mode: the fake tensors' mode.
        inline: converts a traced graph.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any], mode: FakeTensorMode, inline: Inline
    ) -> None:
        self._tensors, self._sizes, self._mode, self._inline = tuple(tensors), tuple(sizes), mode, inline
        self._traces: dict[tuple[Flags, Flags], _Trace | None] = {}

    def differentiable(self, call: AtenCall) -> Flags | None:
        """Which results of the operator carry a gradient when all its tensors do; None where fakes do not tell."""
        try:
            with ExitStack() as stack:
                self._enter(stack)
                stack.enter_context(torch.enable_grad())
                leaves = [_leaf(t, _can_have_gradient(t)) for t in self._tensors]
                made = _makes_tensors(call.function)
                results = call.results(leaves, self._sizes)
                return tuple(r.requires_grad and not (made and _has_no_derivative(r)) for r in results)
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return None

    def __call__(
        self, op: Builder, node: ir.Node, active: Sequence[bool], cotangents: Sequence[ir.Value | None]
    ) -> list[ir.Value | None] | None:
        """Appends the gradient's nodes; None where it has to be taken at run time (`ops.aten.AtenGradient`)."""
        key = (tuple(active), tuple(c is not None for c in cotangents))
        if key not in self._traces:
            self._traces[key] = self._traced(aten_call(node), *key)
        trace = self._traces[key]
        if trace is None:
            return None
        before = len(op.graph)
        try:
            found = iter(self._inlined(trace, op, node, [c for c in cotangents if c is not None]))
            for made in list(op.graph)[before:]:
                definition_of(made).output_types(made)  # raises where the graph would not be whole
        except (OnnxTrainError, ValueError) as error:
            LOG.debug("%s: the traced gradient has no form in the graph: %s", node.name, error)
            op.graph.remove(list(op.graph)[before:][::-1], safe=True)
            self._traces[key] = None
            return None
        return [next(found) if a else None for a in active]

    def _inlined(
        self, trace: _Trace, op: Builder, node: ir.Node, cotangents: Sequence[ir.Value]
    ) -> list[ir.Value | None]:
        count = len(self._tensors)
        known: dict[Node, Any] = {}
        given = iter([*node.inputs[:count], *self._sizes, *cotangents])
        for place in trace.module.graph.find_nodes(op="placeholder"):
            known[place] = next(given)
        for repeated in trace.forward:
            outputs = iter(node.outputs)
            known[repeated] = pytree.tree_map(
                lambda e, rest=outputs: next(rest) if isinstance(e, torch.Tensor) else e, repeated.meta["val"]
            )
        return self._inline(op, trace.module, known)

    # Tracing

    def _enter(self, stack: ExitStack, python_formulas: bool = False) -> list[Any]:
        """The state in which operators run on the fakes; gives the list of what is decided from sizes."""
        stack.enter_context(CAPTURE_LOCK)
        stack.enter_context(reports_dropped())
        stack.enter_context(autocast_disabled())
        stack.enter_context(self._mode)
        stack.callback(setattr, self._mode, "cache_enabled", self._mode.cache_enabled)
        self._mode.cache_enabled = False  # what it has cached it fits to the sizes, which looks like a decision
        if python_formulas:
            stack.enter_context(enable_python_dispatcher())
        return stack.enter_context(size_decisions(self._mode.shape_env))

    def _traced(self, call: AtenCall, active: Flags, given: Flags) -> _Trace | None:
        if call.autocast:
            return None
        # PyTorch's C++ formulas call its fused backward operators; where they need plain sizes, Python's may do.
        for python_formulas in (False, True):
            try:
                return self._trace(call, active, given, python_formulas)
            except Exception as error:  # noqa: BLE001  # PyTorch's tracing raises anything
                LOG.debug("%s: gradient at run time, because it cannot be traced: %s", call.__name__, error)
        return None

    def _trace(self, call: AtenCall, active: Flags, given: Flags, python_formulas: bool) -> _Trace:
        with ExitStack() as stack:
            decided = self._enter(stack, python_formulas)
            if len({t.dtype for t in self._tensors if t.is_floating_point()}) > 1:
                # While it traces, PyTorch takes formulas without in-place steps, which keep a half precision.
                raise Refused("its element types are mixed, and the trace rounds in other places than eager does")
            if is_composite(call.function) and torch.Tag.nondeterministic_seeded in call.function.tags:
                raise Refused("random numbers would be drawn again, or not at all, as in the parts of an LSTM")
            module = self._module(call, active, given)
            if decided:
                raise Refused(f"it depends on {decided[0]}")
        trace = _Trace(module, _find_forward(module, call, len(self._tensors)))
        self._check(trace, call)
        return trace

    def _module(self, call: AtenCall, active: Flags, given: Flags) -> GraphModule:
        def gradients(tensors: list[torch.Tensor], sizes: list[Any], cotangents: list[torch.Tensor]) -> list[Any]:
            with torch.enable_grad():
                leaves = [_leaf(t, a) for t, a in zip(tensors, active, strict=True)]
                results = call.results(leaves, sizes)
            rest = iter(cotangents)
            pairs = [(r, next(rest)) for r, g in zip(results, given, strict=True) if g]
            pairs = [(r, c) for r, c in pairs if r.requires_grad]
            wanted = [leaf for leaf, a in zip(leaves, active, strict=True) if a]
            if not pairs:
                return [None] * len(wanted)
            return list(torch.autograd.grad([r for r, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True))

        tensors = [t.detach() for t in self._tensors]
        with torch.no_grad():
            results = call.results(tensors, self._sizes)
        if any(r.layout != torch.strided for r in results):
            raise Refused("its results are not strided")
        cotangents = [torch.empty_like(r) for r, g in zip(results, given, strict=True) if g]
        inputs = (tensors, list(self._sizes), cotangents)
        module = make_fx(gradients, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        if any(_changes_in_place(n) for n in module.graph.nodes):
            functional = dispatch_functionalize(module, FunctionalTensorMode())
            with torch.no_grad():
                module = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        return module

    def _check(self, trace: _Trace, call: AtenCall) -> None:
        """Raises where the trace does more, or at some sizes other, than autograd does."""
        module = trace.module
        _drop_unused(module, trace.forward)
        _fold_conjugates(module)
        for node in module.graph.nodes:
            if node in trace.forward or node.op != "call_function":
                continue
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise Refused(f"{node.target} would draw again")
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise Refused(f"{node.target} gives a tensor of {value.layout}")
            known = set().union(*(free_unbacked_symbols(t) for t in self._tensors))
            if any(free_unbacked_symbols(v) - known for v in pytree.tree_leaves(value) if _has_sizes(v)):
                raise Refused(f"{node.target} gives a size that depends on elements")
        for binding in self._small_sizes():
            if self._runs_at(call, binding) and (fault := _fault_at(module, binding)):
                raise Refused(fault)

    def _small_sizes(self) -> list[dict[Any, Any]]:
        """Sizes of 1 instead of the example's: all, and one at a time."""
        symbols = sorted(set().union(*map(_symbols, (*self._tensors, *self._sizes))), key=str)
        if not symbols:
            return []
        env: Any = self._mode.shape_env
        hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
        example = {s: sympy.Integer(hints.get(s, 2)) for s in symbols}
        one = sympy.Integer(1)
        return [dict.fromkeys(symbols, one), *({**example, s: one} for s in symbols if len(symbols) > 1)]

    def _runs_at(self, call: AtenCall, binding: Mapping[Any, Any]) -> bool:
        try:
            with CAPTURE_LOCK, reports_dropped(), torch.no_grad(), FakeTensorMode():
                call.results([_at(t, binding) for t in self._tensors], [_at(s, binding) for s in self._sizes])
        except Exception:  # noqa: BLE001  # the operator refuses these sizes
            return False
        return True


def _fault_at(module: GraphModule, binding: Mapping[Any, Any]) -> str:
    """The first node that has another shape at these sizes than the trace says, in words; "" if none has."""
    values: dict[Node, Any] = {}
    with CAPTURE_LOCK, reports_dropped(), torch.no_grad(), FakeTensorMode() as mode:
        for node in module.graph.nodes:
            expected = _at(node.meta.get("val"), binding)
            if node.op == "placeholder":
                values[node] = expected
            elif node.op == "get_attr":
                values[node] = mode.from_tensor(getattr(module, node.target))
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
                if not _same_shapes(values[node], expected):
                    return f"{node.target} has another shape where {dict(binding)}"
    return ""


def _at(value: Any, binding: Mapping[Any, Any]) -> Any:
    """A symbolic tensor, size, or structure of them, where the sizes' symbols are as in `binding`."""
    if isinstance(value, (list, tuple)):
        return [_at(part, binding) for part in value]
    if isinstance(value, torch.SymInt):
        return int(value.node.expr.xreplace(binding))
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = _at(value.shape, binding), _at(value.stride(), binding)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _same_shapes(found: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return all(getattr(f, "shape", f) == getattr(e, "shape", e) for f, e in pairs)


def _makes_tensors(target: Any) -> bool:
    """Whether an operator is of the kind of `randn_like`: in Python its results have no gradient."""
    return {"dtype", "layout", "device", "pin_memory"} <= {argument.name for argument in schema_of(target).arguments}


def _has_no_derivative(tensor: torch.Tensor) -> bool:
    return type(tensor.grad_fn).__name__ == "NotImplemented"


def _leaf(tensor: torch.Tensor, active: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_() if active else tensor


def _can_have_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_sizes(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt))


def _symbols(value: Any) -> set[Any]:
    parts = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return set().union(*(p.node.expr.free_symbols for p in parts if isinstance(p, torch.SymInt)))


def _changes_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _fold_conjugates(module: GraphModule) -> None:
    """Conjugates plain numbers now: `CONJ` takes none.

    `z * 2j` saves its number as a tensor, which is 2j itself in the trace.
    """
    for node in module.graph.find_nodes(op="call_function", target=CONJ.default):
        (number,) = node.args
        if isinstance(number, (int, float, complex)):
            for user in list(node.users):
                _replace(user, node, number.conjugate())
            module.graph.erase_node(node)


def _replace(user: Node, argument: Node, number: complex) -> None:
    def replaced(node: Node) -> Any:
        return number if node is argument else node

    user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)


_SAME = ("aten.detach.default", "aten.alias.default")


def _source(node: Any) -> Any:
    while isinstance(node, Node) and str(node.target) in _SAME:
        node = node.args[0]
    return node


def _find_forward(module: GraphModule, call: AtenCall, tensors: int) -> tuple[Node, ...]:
    """The call of the operator itself: autograd runs it before all else, on the tensors that came in.

    A derivative that is written with the operator's result computes it again: those calls are found too.
    """
    places = module.graph.find_nodes(op="placeholder")[:tensors]
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is call.function]
    if not calls or [a for a in map(_source, _taken(calls[0])) if _is_tensor(a)] != list(places):
        return ()
    if torch.Tag.nondeterministic_seeded in call.function.tags:
        return (calls[0],)
    same = [_source(a) for a in _taken(calls[0])]
    return tuple(n for n in calls if [_source(a) for a in _taken(n)] == same)


def _taken(node: Node) -> list[Any]:
    leaves: list[Any] = pytree.tree_leaves((node.args, node.kwargs))
    return leaves


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _drop_unused(module: GraphModule, forward: Sequence[Node]) -> None:
    """Drops what the gradients do not need, and what the forward node gives anyway."""
    kept: set[Node] = set()
    open_nodes = [module.graph.output_node()]
    while open_nodes:
        node = open_nodes.pop()
        if node not in kept:
            kept.add(node)
            if node not in forward:
                open_nodes += node.all_input_nodes
    for node in reversed(list(module.graph.nodes)):
        if node not in kept and node.op != "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
