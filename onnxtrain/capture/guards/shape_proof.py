"""Prove that a captured graph is valid at sizes that its export did not assume.

The graph is a sequence of PyTorch's operators, and each computes the same as in eager at all sizes. Only shapes can be
wrong: an operator may return a shape that contradicts the graph (`squeeze` of a dimension that is now 1, a broadcast of
equal sizes). A run on fake tensors of the real sizes compares all shapes, which takes milliseconds.

A data-dependent size (of `x[mask]`, of `nonzero`) is a symbol in such a run, as it was in the export. The graph has to
be valid for each of its values that the decisions on elements leave: the export must have assumed nothing else of it,
and the shapes are also compared for 0 and 1, which operators treat specially.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from onnxtrain.capture import source_location
from onnxtrain.capture.guards.data_dependent_sizes import DataDependentSizes, bounds_of, symbolic_sizes
from onnxtrain.capture.guards.size_decisions import InputDim
from onnxtrain.system.time_limit import check_time
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.symbols import is_data_dependent, unreplaced_expression
from onnxtrain.torch_compat.tensors import own_memory

_SPECIAL_SIZES = (0, 1)  # operators treat them differently from all others


class Proof:
    """An exported graph that `reason` runs on fake tensors and `same_graph` compares.

    Args:
        program: the export.
        symbols: the dimension whose size each symbol is.
        facts: conditions on data-dependent sizes that hold in each call of the graph.
        traced: the program before its operators were decomposed. Their decompositions are valid at other sizes only if
            the operators have the shapes there that they were decomposed for.
        has_explicit_casts: whether the casts of autocast are nodes of `program`. If not, it runs under the caller's
            autocast, as it was traced.

    Attributes:
        graph_module: the graph.
        symbols: as given.
        signature: the kinds and targets of its inputs and outputs.
        constants: its lifted tensors.
        data_dependent: the symbols of sizes that depend on tensor values.
    """

    def __init__(
        self,
        program: ExportedProgram,
        symbols: dict[Any, InputDim],
        traced: ExportedProgram | None = None,
        facts: Sequence[Any] = (),
        *,
        has_explicit_casts: bool = True,
    ) -> None:
        self._traced = None if traced is None else Proof(traced, symbols, None, facts, has_explicit_casts=False)
        self._facts = tuple(facts)
        self._has_explicit_casts = has_explicit_casts
        self.graph_module = program.graph_module
        self.symbols = symbols
        signature = program.graph_signature
        self.signature = [(spec.kind, spec.target) for spec in (*signature.input_specs, *signature.output_specs)]
        constants = [str(spec.target) for spec in signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR]
        self.constants = [own_memory(program.constants[name]) for name in constants]
        values = [node.meta.get("val") for node in program.graph.nodes]
        used = {s for value in values for size in symbolic_sizes(value) for s in _all_symbols(size)}
        self.data_dependent = {s for s in used if is_data_dependent(s)}

    def reason(self, binding: dict[Any, Any]) -> str:
        """Say why the graph is not valid at the sizes of `binding`; "" if it is."""
        return self._own_reason(binding) or ("" if self._traced is None else self._traced.reason(binding))

    def _own_reason(self, binding: dict[Any, Any]) -> str:
        try:
            with self._run_state(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
                reason = self._run(mode, dict(binding))
        except Exception as error:  # noqa: BLE001  # an operator that refuses these sizes may raise anything
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return reason or next(filter(None, (self._reason_at(binding, size) for size in _SPECIAL_SIZES)), "")

    def _reason_at(self, binding: dict[Any, Any], size: int) -> str:
        """Say why the graph is not valid if all data-dependent sizes are `size`; "" if it is."""
        if not self.data_dependent:
            return ""
        bounds = bounds_of(fact.xreplace(binding) for fact in self._facts)
        sizes = {s: sympy.Integer(_nearest(size, *bounds.get(s, (0, None)))) for s in self.data_dependent}
        if not all(fact.xreplace({**binding, **sizes}) == sympy.true for fact in self._facts):
            return ""  # no call has these sizes
        try:
            with self._run_state(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
                return self._run(mode, {**binding, **sizes})
        except Exception:  # noqa: BLE001  # an operator may raise anything
            return ""  # an operator that refuses this size also refuses it at run time, as in eager

    @contextmanager
    def _run_state(self) -> Iterator[None]:
        """Disable gradients, and autocast if its casts are nodes of the graph."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in ("cpu", "cuda"):
                if self._has_explicit_casts and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _run(self, mode: FakeTensorMode, binding: dict[Any, Any]) -> str:
        all_bound = self.data_dependent <= binding.keys()
        results: dict[Node, Any] = {}
        # With numbers for all data-dependent sizes, the symbols of the environment are replaced at once.
        sizes = DataDependentSizes(None if all_bound else mode.shape_env, self._facts)
        for node in self.graph_module.graph.nodes:
            if node.op == "output":
                break
            check_time()
            expected = node.meta.get("val")
            if node.op == "placeholder":
                results[node] = _fake(expected, binding)
            elif node.op == "get_attr":
                value = getattr(self.graph_module, node.target)
                results[node] = mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            else:
                args, kwargs = map_arg((node.args, node.kwargs), results.__getitem__)
                if str(node.target) == "aten._assert_scalar.default":
                    sizes.assert_condition(args[0])
                    continue
                sizes.check_by_kernel(node, args)
                results[node] = node.target(*args, **kwargs)
                if all_bound and next(symbolic_sizes(results[node]), None) is not None:
                    results[node] = _fake(expected, binding)
                _bind_data_dependent(node, results[node], binding)
                sizes.bound_selected(node, args, results[node])
                sizes.use_facts(binding)
                if not _agrees(results[node], expected, binding, dtypes=self._has_explicit_casts):
                    return (
                        f"{node.target} has another shape at these sizes ({source_location.of_node(node) or node.name})"
                    )
        return sizes.assumption()


def _nearest(size: int, lower: int, upper: int | None) -> int:
    return max(size, lower) if upper is None else min(max(size, lower), upper)


def _all_symbols(size: torch.SymInt) -> set[Any]:
    """Return the symbols in a size's expression, and those that an assumption replaced in it."""
    symbols: set[Any] = size.node.expr.free_symbols | unreplaced_expression(size).free_symbols
    return symbols


def _size(size: Any, binding: dict[Any, Any]) -> int | sympy.Expr:
    """Evaluate a size under `binding`: an int, or an expression if the size is data-dependent."""
    expr = _expr(size, binding)
    return int(expr) if expr.is_Integer else expr


def _fake(value: Any, binding: dict[Any, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_fake(part, binding) for part in value]
    if isinstance(value, torch.SymInt):
        return _size(value, binding)
    if not isinstance(value, torch.Tensor):
        return value
    shape = [_size(size, binding) for size in value.shape]
    strides = [_size(stride, binding) for stride in value.stride()]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _bind_data_dependent(node: Node, result: Any, binding: dict[Any, Any]) -> None:
    """Bind the export's symbols of data-dependent sizes to the sizes in this run, where a node introduces them."""
    for symbol, path in node.meta.get("unbacked_bindings", {}).items():
        if not is_data_dependent(symbol):
            continue  # a number of floats, which no size is
        size = result
        for key in path:
            size = key.get(size)
        binding.setdefault(symbol, _expr(size, {}))
    _bind_value(result, node.meta.get("val"), binding)


def _bind_value(result: Any, expected: Any, binding: dict[Any, Any]) -> None:
    """Bind the symbols in a node's value: PyTorch records no path for some, as for an item read by `int(tensor)`."""
    if isinstance(expected, (list, tuple)):
        for r, e in zip(result, expected, strict=False):
            _bind_value(r, e, binding)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(expected, torch.Tensor):
        pairs = list(zip(result.shape, expected.shape, strict=False))
    elif isinstance(expected, torch.SymInt):
        pairs = [(result, expected)]
    for size, e in pairs:
        symbol = unreplaced_expression(e) if isinstance(e, torch.SymInt) else None
        if symbol is not None and symbol.is_Symbol and is_data_dependent(symbol):
            binding.setdefault(symbol, _expr(size, {}))


def _agrees(result: Any, expected: Any, binding: dict[Any, Any], dtypes: bool) -> bool:
    """Compare shapes and, with `dtypes`, dtypes: autocast casts an LSTM's operands again, below the trace."""
    if isinstance(expected, (list, tuple)):
        return len(result) == len(expected) and all(map(lambda r, e: _agrees(r, e, binding, dtypes), result, expected))
    if isinstance(expected, torch.Tensor):
        shape = [_size(size, binding) for size in expected.shape]
        is_same_dtype = result.dtype == expected.dtype or not dtypes
        return is_same_dtype and [_size(size, {}) for size in result.shape] == shape
    if isinstance(expected, torch.SymInt):
        # The export may know an element of a tensor as a number, from a kernel's later check of it.
        return _is_data_dependent_size(result) or _size(result, {}) == _size(expected, binding)
    return True


def _is_data_dependent_size(value: Any) -> bool:
    """Return whether a value is a data-dependent size of which nothing is known."""
    expr = value.node.expr if isinstance(value, torch.SymInt) else None
    return expr is not None and expr.is_Symbol and is_data_dependent(expr)


# Comparing two graphs


def same_graph(one: Proof, other: Proof, ones: frozenset[InputDim], *, shapes: bool = False) -> bool:
    """Return whether two graphs of the same inputs have the same nodes if the dimensions in `ones` are 1.

    With `shapes`, they must also have the same shapes, as expressions of the inputs': `tensor_split(x, 2)` is one node
    for all lengths of x, but its results have other shapes for odd ones. Without, the caller asks `Proof.reason`.
    """
    return (
        one.signature == other.signature
        and all(map(same_constant, one.constants, other.constants))
        and _normal_form(one, ones, shapes) == _normal_form(other, ones, shapes)
    )


def same_constant(one: Any, other: Any) -> bool:
    """Return whether two constants of graphs are equal tensors; False for any other objects that are not the same."""
    if one is other:
        return True
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _normal_form(proof: Proof, ones: frozenset[InputDim], shapes: bool) -> list[Any]:
    """Return the nodes in order, without names and without views that change nothing, and sizes as expressions."""
    renamed: dict[Any, Any] = {}
    for symbol, (i, d) in proof.symbols.items():
        renamed[symbol] = sympy.Integer(1) if (i, d) in ones else sympy.Symbol(f"s{i}_{d}", integer=True, positive=True)
    form: list[Any] = []
    labels: dict[Node, Any] = {}

    def normal(value: Any) -> Any:
        if isinstance(value, Node):
            return labels[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(normal, value))
        if isinstance(value, dict):
            return tuple((key, normal(part)) for key, part in value.items())
        if isinstance(value, slice):
            return "slice", *map(normal, (value.start, value.stop, value.step))
        if type(value) is int:
            return "size", str(value)
        return type(value).__name__, repr(value)

    for node in proof.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            expr = value.node.expr.xreplace(renamed) if isinstance(value, torch.SymInt) else value
            labels[node] = "size", str(expr)
        elif node.op == "call_function" and _changes_nothing(node, renamed):
            labels[node] = labels[node.args[0]]
        else:
            labels[node] = "node", len(form)
            target = node.name if node.op == "placeholder" else str(node.target)
            if node.op == "get_attr":  # the text of a subgraph, which contains no names of this graph
                target = str(getattr(proof.graph_module, target))
            form.append(
                (node.op, target, normal(node.args), normal(node.kwargs), _shapes(value, renamed) if shapes else ())
            )
    return form


def _shapes(value: Any, renamed: dict[Any, Any]) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(part, renamed) for part in value)
    return tuple(str(_expr(size, renamed)) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def _changes_nothing(node: Node, renamed: dict[Any, Any]) -> bool:
    """Return whether a view has the sizes and strides of its input.

    False for `detach` and `alias`, which take no sizes.
    """
    if (
        not isinstance(node.target, OpOverload)
        or len(node.args) + len(node.kwargs) < 2
        or not isinstance(node.args[0], Node)
    ):
        return False
    schema = schema_of(node.target)
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or schema.returns[0].alias_info.is_write:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.ndim != after.ndim:
        return False
    if before.dtype != after.dtype or _expr(before.storage_offset(), renamed) != _expr(after.storage_offset(), renamed):
        return False
    for d in range(before.ndim):
        size = _expr(before.shape[d], renamed)
        if size != _expr(after.shape[d], renamed):
            return False
        if size != 1 and _expr(before.stride(d), renamed) != _expr(after.stride(d), renamed):
            return False
    return True


def _expr(size: Any, renamed: dict[Any, Any]) -> Any:
    return size.node.expr.xreplace(renamed) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
