"""Trace the gradient of an operator without a definition from PyTorch's own autograd, on fake tensors.

    y = ATen(a, b) [linalg_solve]     dy ──>  ATen [linalg_solve], Mul, ReduceSum, … ──> da, db

The operator is run and differentiated under autograd. Each operator that autograd calls is converted as in forward: to
an op with a definition if there is one, otherwise to an ATen node. Results of the forward node are reused.

A trace must be valid at all sizes at which the operator runs. It is refused, and the node runs under autograd at run
time, if PyTorch made a decision from sizes during the trace, if a size of 1 would change a shape, if random numbers
would be sampled again, or if fake tensors do not suffice.
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
from onnxtrain.capture.functionalize.composite_operators import record_size_guards
from onnxtrain.errors import OnnxTrainError
from onnxtrain.graph.builder import Builder
from onnxtrain.log import LOG
from onnxtrain.ops import definition_of
from onnxtrain.ops.aten_node import AtenCall, aten_call, can_have_gradient, is_composite
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.aten_operators import CONJ
from onnxtrain.torch_compat.decompositions import enable_python_dispatcher
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode, FunctionalTensorMode, dispatch_functionalize
from onnxtrain.torch_compat.modes import autocast_disabled
from onnxtrain.torch_compat.operators import OpOverload, schema_of

Flags = tuple[bool, ...]
# (builder, traced module, the values of nodes that need no conversion) -> the module's outputs
Inline = Callable[[Builder, GraphModule, Mapping[Node, Any]], list[Any]]


class RefusedTrace(Exception):  # noqa: N818  # caught in this file; its text is the reason
    """The trace would not be valid at all sizes."""


@dataclass(frozen=True)
class _Trace:
    """A traced gradient.

    Attributes:
        module: (tensors, sizes, existing cotangents) -> a gradient or None for each active tensor.
        forward: its nodes that repeat the forward operator.
    """

    module: GraphModule
    forward: tuple[Node, ...]


class TracedGradient:
    """The gradient of one ATen node, traced once per pattern of active tensors and existing cotangents.

    Args:
        tensors: fake tensors for the node's tensors.
        sizes: PyTorch's symbolic sizes for the node's sizes.
        mode: the mode of the fake tensors.
        inline: converts a traced graph.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any], mode: FakeTensorMode, inline: Inline
    ) -> None:
        self._tensors, self._sizes, self._mode, self._inline = tuple(tensors), tuple(sizes), mode, inline
        self._traces: dict[tuple[Flags, Flags], _Trace | None] = {}

    def differentiable(self, call: AtenCall) -> Flags | None:
        """Return which results have a gradient if all tensors do; None if the operator does not run on fake tensors."""
        try:
            with ExitStack() as stack:
                self._enter(stack)
                stack.enter_context(torch.enable_grad())
                leaves = [_leaf(t, can_have_gradient(t)) for t in self._tensors]
                is_factory = _is_factory(call.function)
                results = call.results(leaves, self._sizes)
                return tuple(r.requires_grad and not (is_factory and _has_no_derivative(r)) for r in results)
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return None

    def __call__(
        self, op: Builder, node: ir.Node, active: Sequence[bool], cotangents: Sequence[ir.Value | None]
    ) -> list[ir.Value | None] | None:
        """Append the gradient's nodes; return None if it has to be computed at run time (`ops.aten.AtenGradient`)."""
        key = (tuple(active), tuple(c is not None for c in cotangents))
        if key not in self._traces:
            self._traces[key] = self._trace(aten_call(node), *key)
        trace = self._traces[key]
        if trace is None:
            return None
        before = len(op.graph)
        try:
            gradients = iter(self._inlined(trace, op, node, [c for c in cotangents if c is not None]))
            for added in list(op.graph)[before:]:
                definition_of(added).output_types(added)  # raises if the graph would be invalid
        except (OnnxTrainError, ValueError) as error:
            LOG.debug("%s: gradient computed at run time, because its trace cannot be converted: %s", node.name, error)
            op.graph.remove(list(op.graph)[before:][::-1], safe=True)
            self._traces[key] = None
            return None
        return [next(gradients) if a else None for a in active]

    def _inlined(
        self, trace: _Trace, op: Builder, node: ir.Node, cotangents: Sequence[ir.Value]
    ) -> list[ir.Value | None]:
        count = len(self._tensors)
        values: dict[Node, Any] = {}
        inputs = iter([*node.inputs[:count], *self._sizes, *cotangents])
        for placeholder in trace.module.graph.find_nodes(op="placeholder"):
            values[placeholder] = next(inputs)
        for repeated in trace.forward:
            outputs = iter(node.outputs)
            values[repeated] = pytree.tree_map(
                lambda e, outputs=outputs: next(outputs) if isinstance(e, torch.Tensor) else e, repeated.meta["val"]
            )
        return self._inline(op, trace.module, values)

    # Tracing

    def _enter(self, stack: ExitStack, python_formulas: bool = False) -> list[Any]:
        """Enter the state in which operators run on the fake tensors; return the live list of decisions from sizes."""
        stack.enter_context(CAPTURE_LOCK)
        stack.enter_context(reports_dropped())
        stack.enter_context(autocast_disabled())
        stack.enter_context(self._mode)
        stack.callback(setattr, self._mode, "cache_enabled", self._mode.cache_enabled)
        self._mode.cache_enabled = False  # reading the cache compares sizes, which looks like a decision
        if python_formulas:
            stack.enter_context(enable_python_dispatcher())
        return stack.enter_context(record_size_guards(self._mode.shape_env))

    def _trace(self, call: AtenCall, active: Flags, has_cotangent: Flags) -> _Trace | None:
        if call.autocast:
            return None
        # PyTorch's C++ formulas call its fused backward operators. If they fail on symbolic sizes, Python's may not.
        for python_formulas in (False, True):
            try:
                return self._trace_with(call, active, has_cotangent, python_formulas)
            except Exception as error:  # noqa: BLE001  # PyTorch's tracing raises anything
                LOG.debug("%s: gradient computed at run time, because it cannot be traced: %s", call.__name__, error)
        return None

    def _trace_with(self, call: AtenCall, active: Flags, has_cotangent: Flags, python_formulas: bool) -> _Trace:
        with ExitStack() as stack:
            decisions = self._enter(stack, python_formulas)
            if len({t.dtype for t in self._tensors if t.is_floating_point()}) > 1:
                # During a trace PyTorch uses formulas without in-place operators, which keep a half precision.
                raise RefusedTrace("its dtypes are mixed, and the trace rounds at different steps from eager")
            if is_composite(call.function) and torch.Tag.nondeterministic_seeded in call.function.tags:
                raise RefusedTrace("random numbers would be sampled again, or not at all, as in the parts of an LSTM")
            module = self._traced_module(call, active, has_cotangent)
            if decisions:
                raise RefusedTrace(f"it depends on {decisions[0]}")
        trace = _Trace(module, _find_forward(module, call, len(self._tensors)))
        self._check(trace, call)
        return trace

    def _traced_module(self, call: AtenCall, active: Flags, has_cotangent: Flags) -> GraphModule:
        def gradients(tensors: list[torch.Tensor], sizes: list[Any], cotangents: list[torch.Tensor]) -> list[Any]:
            with torch.enable_grad():
                leaves = [_leaf(t, a) for t, a in zip(tensors, active, strict=True)]
                results = call.results(leaves, sizes)
            with_cotangents = [r for r, has in zip(results, has_cotangent, strict=True) if has]
            pairs = [(r, c) for r, c in zip(with_cotangents, cotangents, strict=True) if r.requires_grad]
            inputs = [leaf for leaf, a in zip(leaves, active, strict=True) if a]
            if not pairs:
                return [None] * len(inputs)
            return list(torch.autograd.grad([r for r, _ in pairs], inputs, [c for _, c in pairs], allow_unused=True))

        tensors = [t.detach() for t in self._tensors]
        with torch.no_grad():
            results = call.results(tensors, self._sizes)
        if any(r.layout != torch.strided for r in results):
            raise RefusedTrace("its results are not strided tensors")
        cotangents = [torch.empty_like(r) for r, has in zip(results, has_cotangent, strict=True) if has]
        inputs = (tensors, list(self._sizes), cotangents)
        module = make_fx(gradients, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        if any(_changes_in_place(n) for n in module.graph.nodes):
            functional = dispatch_functionalize(module, FunctionalTensorMode())
            with torch.no_grad():
                module = make_fx(functional, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        return module

    def _check(self, trace: _Trace, call: AtenCall) -> None:
        """Refuse a trace that does more than autograd, or does something else at some sizes."""
        module = trace.module
        _drop_unused(module, trace.forward)
        _fold_conjugates(module)
        for node in module.graph.nodes:
            if node in trace.forward or node.op != "call_function":
                continue
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise RefusedTrace(f"{node.target} would sample again")
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise RefusedTrace(f"{node.target} returns a tensor of layout {value.layout}")
            input_symbols = set().union(*(free_unbacked_symbols(t) for t in self._tensors))
            if any(free_unbacked_symbols(v) - input_symbols for v in pytree.tree_leaves(value) if _has_sizes(v)):
                raise RefusedTrace(f"{node.target} returns a data-dependent size")
        for binding in self._other_sizes():
            if self._runs_at(call, binding) and (fault := _fault_at(module, binding)):
                raise RefusedTrace(fault)

    def _other_sizes(self) -> list[dict[Any, Any]]:
        """Return sizes to check a trace at: twice the example's, and 1 for all symbols and for one at a time.

        A size that is computed from the example's may be 1, as s0 - 1, and is not where they are twice as large.
        """
        symbols = sorted(set().union(*map(_symbols, (*self._tensors, *self._sizes))), key=str)
        if not symbols:
            return []
        env: Any = self._mode.shape_env
        hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
        example = {s: sympy.Integer(hints.get(s, 2)) for s in symbols}
        one = sympy.Integer(1)
        ones = [dict.fromkeys(symbols, one), *({**example, s: one} for s in symbols if len(symbols) > 1)]
        return [{s: 2 * size for s, size in example.items()}, *ones]

    def _runs_at(self, call: AtenCall, binding: Mapping[Any, Any]) -> bool:
        try:
            with CAPTURE_LOCK, reports_dropped(), torch.no_grad(), FakeTensorMode():
                call.results([_at(t, binding) for t in self._tensors], [_at(s, binding) for s in self._sizes])
        except Exception:  # noqa: BLE001  # the operator refuses these sizes
            return False
        return True


def _fault_at(module: GraphModule, binding: Mapping[Any, Any]) -> str:
    """Describe the first node whose shape at these sizes contradicts the trace; "" if there is none."""
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
                    return f"{node.target} has a different shape from the trace at the sizes {dict(binding)}"
    return ""


def _at(value: Any, binding: Mapping[Any, Any]) -> Any:
    """Evaluate a symbolic tensor, size, or structure of them at the sizes of `binding`."""
    if isinstance(value, (list, tuple)):
        return [_at(part, binding) for part in value]
    if isinstance(value, torch.SymInt):
        return int(value.node.expr.xreplace(binding))
    if not isinstance(value, torch.Tensor):
        return value
    shape, strides = _at(value.shape, binding), _at(value.stride(), binding)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _same_shapes(results: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True)
    return all(getattr(r, "shape", r) == getattr(e, "shape", e) for r, e in pairs)


def _is_factory(target: Any) -> bool:
    """Return whether an operator is a factory such as `randn_like`, whose results have no gradient in Python."""
    return {"dtype", "layout", "device", "pin_memory"} <= {argument.name for argument in schema_of(target).arguments}


def _has_no_derivative(tensor: torch.Tensor) -> bool:
    return type(tensor.grad_fn).__name__ == "NotImplemented"


def _leaf(tensor: torch.Tensor, active: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_() if active else tensor


def _has_sizes(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt))


def _symbols(value: Any) -> set[Any]:
    parts = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return set().union(*(p.node.expr.free_symbols for p in parts if isinstance(p, torch.SymInt)))


def _changes_in_place(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable


def _fold_conjugates(module: GraphModule) -> None:
    """Fold conjugates of Python numbers, because `CONJ` takes tensors only.

    Autograd saves the number of `z * 2j` as a tensor, but the trace contains 2j itself.
    """
    for node in module.graph.find_nodes(op="call_function", target=CONJ.default):
        (number,) = node.args
        if isinstance(number, (int, float, complex)):
            for user in list(node.users):
                _replace_argument(user, node, number.conjugate())
            module.graph.erase_node(node)


def _replace_argument(user: Node, argument: Node, number: complex) -> None:
    def replaced(node: Node) -> Any:
        return number if node is argument else node

    user.args, user.kwargs = map_arg((user.args, user.kwargs), replaced)


_IDENTITIES = ("aten.detach.default", "aten.alias.default")


def _without_identities(node: Any) -> Any:
    while isinstance(node, Node) and str(node.target) in _IDENTITIES:
        node = node.args[0]
    return node


def _find_forward(module: GraphModule, call: AtenCall, tensors: int) -> tuple[Node, ...]:
    """Find the calls of the forward operator: the first, which autograd runs on the inputs, and repetitions of it.

    A derivative formula that uses the operator's result recomputes it.
    """
    placeholders = module.graph.find_nodes(op="placeholder")[:tensors]
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is call.function]
    if not calls or [a for a in _argument_leaves(calls[0]) if _is_tensor(a)] != list(placeholders):
        return ()
    if torch.Tag.nondeterministic_seeded in call.function.tags:
        return (calls[0],)
    return tuple(n for n in calls if _argument_leaves(n) == _argument_leaves(calls[0]))


def _argument_leaves(node: Node) -> list[Any]:
    return [_without_identities(a) for a in pytree.tree_leaves((node.args, node.kwargs))]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _drop_unused(module: GraphModule, forward: Sequence[Node]) -> None:
    """Remove the nodes that the gradients do not need, and those that only compute results of the forward node."""
    used: set[Node] = set()
    to_visit = [module.graph.output_node()]
    while to_visit:
        node = to_visit.pop()
        if node not in used:
            used.add(node)
            if node not in forward:
                to_visit += node.all_input_nodes
    for node in reversed(list(module.graph.nodes)):
        if node not in used and node.op != "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
