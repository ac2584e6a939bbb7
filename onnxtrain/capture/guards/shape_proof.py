"""Whether a captured graph is right at sizes that were not assumed when it was captured.

The graph is a sequence of PyTorch's operators, and at any sizes each does there what it does in eager. What can go
wrong is that one gives another shape than the graph says (`squeeze` of a size that is now 1, a broadcast that was an
equality): so the graph is run on fake tensors of the real sizes, and all shapes are compared. It takes milliseconds.

A size that only the elements tell (of `x[mask]`, of `nonzero`) is a symbol in such a run, as it was in the export. The
graph has to be right whatever it turns out to be: nothing may have been assumed of it, and the shapes are compared for
0 and 1 as well, the sizes that operators treat as special.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import sympy
import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg

from onnxtrain.capture.guards.size_decisions import Place
from onnxtrain.capture.source_line import in_text
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode
from onnxtrain.torch_compat.symbols import is_always_true, is_data_dependent, unbounded, unreplaced_expression

_SPECIAL = (0, 1)  # sizes that operators treat otherwise than all others


class Proof:
    """A captured graph, kept for what `reason` has to try out and `same_graph` to compare.

    `traced` is the program before its operators were decomposed: the decompositions are right at other sizes only where
    its operators have the shapes there that they had when they were decomposed. It runs in the caller's autocast, as it
    was traced, for its casts are not written out.
    """

    def __init__(
        self,
        program: ExportedProgram,
        symbols: dict[Any, Place],
        traced: ExportedProgram | None = None,
        *,
        casts_written: bool = True,
    ) -> None:
        self._traced = None if traced is None else Proof(traced, symbols, casts_written=False)
        self._casts_written = casts_written
        self.graph_module = program.graph_module
        self.symbols = symbols
        signature = program.graph_signature
        self.signature = [(spec.kind, spec.target) for spec in (*signature.input_specs, *signature.output_specs)]
        constants = [str(spec.target) for spec in signature.input_specs if spec.kind == InputKind.CONSTANT_TENSOR]
        self.constants = [program.constants[name] for name in constants]
        values = [node.meta.get("val") for node in program.graph.nodes]
        found = {s for value in values for size in _symbolic_sizes(value) for s in _all_symbols(size)}
        # The sizes that only the elements tell.
        self.unknown = {s for s in found if is_data_dependent(s)}

    def reason(self, binding: dict[Any, Any]) -> str:
        """Why the graph is not right at the sizes of `binding`, in words; "" if it is."""
        return self._own_reason(binding) or ("" if self._traced is None else self._traced.reason(binding))

    def _own_reason(self, binding: dict[Any, Any]) -> str:
        try:
            with self._plain_state(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
                reason = self._run(mode, dict(binding)) or _assumption(mode.shape_env)
        except Exception as error:  # noqa: BLE001  # an operator refuses these sizes: it may raise anything
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return reason or next(filter(None, (self._reason_at(binding, size) for size in _SPECIAL)), "")

    def _reason_at(self, binding: dict[Any, Any], size: int) -> str:
        """Why the graph is not right where all sizes that only the elements tell are `size`; "" if it is."""
        if not self.unknown:
            return ""
        try:
            with self._plain_state(), FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
                return self._run(mode, {**binding, **dict.fromkeys(self.unknown, sympy.Integer(size))})
        except Exception:  # noqa: BLE001  # anything
            return ""  # an operator that refuses that size refuses it when the graph runs, as it does in eager

    @contextmanager
    def _plain_state(self) -> Iterator[None]:
        """No autocast where the graph has its casts written out; and no gradient is needed."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device in ("cpu", "cuda"):
                if self._casts_written and torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def _run(self, mode: FakeTensorMode, binding: dict[Any, Any]) -> str:
        known = self.unknown <= binding.keys()
        results: dict[Node, Any] = {}
        for node in self.graph_module.graph.nodes:
            if node.op == "output":
                break
            expected = node.meta.get("val")
            if node.op == "placeholder":
                results[node] = _fake(expected, binding)
            elif node.op == "get_attr":
                value = getattr(self.graph_module, node.target)
                results[node] = mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            else:
                args, kwargs = map_arg((node.args, node.kwargs), results.__getitem__)
                results[node] = node.target(*args, **kwargs)
                if known and next(_symbolic_sizes(results[node]), None) is not None:
                    results[node] = _fake(expected, binding)
                _bind_unknown(results[node], expected, binding)
                if not _agrees(results[node], expected, binding, dtypes=self._casts_written):
                    return f"{node.target} has another shape there ({in_text(node.stack_trace) or node.name})"
        return ""


def _symbolic_sizes(value: Any) -> Iterator[torch.SymInt]:
    if isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, torch.Tensor):
        for size in value.shape:
            yield from _symbolic_sizes(size)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _symbolic_sizes(part)


def _all_symbols(size: torch.SymInt) -> set[Any]:
    """Those in its expression, and those that an assumption replaced there."""
    symbols: set[Any] = size.node.expr.free_symbols | unreplaced_expression(size).free_symbols
    return symbols


def _assumption(env: ShapeEnv | None) -> str:
    """What was assumed in `env` of a size that only the elements tell, besides that it is not negative; "" if nothing.

    PyTorch leaves such an assumption to a check when the graph runs, which ours does not have.
    """
    if env is None:
        return ""
    for checks in env.deferred_runtime_asserts.values():
        for check in checks:
            ranges = {s: _range(env, s) for s in check.expr.free_symbols}
            if not is_always_true(check.expr, ranges):
                return str(check.expr)
    return ""


def _range(env: ShapeEnv, symbol: Any) -> Any:
    return unbounded() if is_data_dependent(symbol) else env.var_to_range[symbol]


def _size(size: Any, binding: dict[Any, Any]) -> int | sympy.Expr:
    """A size under `binding`: an int where it is known, an expression where only the elements tell it."""
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


def _bind_unknown(found: Any, expected: Any, binding: dict[Any, Any]) -> None:
    """Notes what the export's new symbols for sizes that only the elements tell are in this run."""
    if isinstance(expected, (list, tuple)):
        for f, e in zip(found, expected, strict=False):
            _bind_unknown(f, e, binding)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(expected, torch.Tensor):
        pairs = list(zip(found.shape, expected.shape, strict=False))
    elif isinstance(expected, torch.SymInt):
        pairs = [(found, expected)]
    for f, e in pairs:
        symbol = e.node.expr if isinstance(e, torch.SymInt) else None
        if symbol is not None and symbol.is_Symbol and is_data_dependent(symbol):
            binding.setdefault(symbol, _expr(f, {}))


def _agrees(found: Any, expected: Any, binding: dict[Any, Any], dtypes: bool) -> bool:
    """Compare shapes, and dtypes if asked: autocast casts an LSTM's operands again, below the level of the trace."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(lambda f, e: _agrees(f, e, binding, dtypes), found, expected))
    if isinstance(expected, torch.Tensor):
        shape = [_size(size, binding) for size in expected.shape]
        is_same_dtype = found.dtype == expected.dtype or not dtypes
        return is_same_dtype and [_size(size, {}) for size in found.shape] == shape
    if isinstance(expected, torch.SymInt):
        return _size(found, {}) == _size(expected, binding)
    return True


# The same graph


def same_graph(one: Proof, other: Proof, ones: frozenset[Place], *, shapes: bool = False) -> bool:
    """Whether two graphs of the same inputs have the same nodes where the sizes at `ones` are 1.

    With `shapes`, also the same shapes, as expressions of the inputs': `tensor_split(x, 2)` is one node for all lengths
    of x, but for odd ones its results have other shapes. Without, `Proof.reason` has to find such.
    """
    return (
        one.signature == other.signature
        and all(map(_same_constant, one.constants, other.constants))
        and _normal_form(one, ones, shapes) == _normal_form(other, ones, shapes)
    )


def _same_constant(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor:
        return False
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _normal_form(proof: Proof, ones: frozenset[Place], shapes: bool) -> list[Any]:
    """The nodes in order, without names, without views that change nothing, sizes as expressions."""
    names: dict[Any, Any] = {}
    for symbol, (i, d) in proof.symbols.items():
        names[symbol] = sympy.Integer(1) if (i, d) in ones else sympy.Symbol(f"s{i}_{d}", integer=True, positive=True)
    form: list[Any] = []
    places: dict[Node, Any] = {}

    def written(value: Any) -> Any:
        if isinstance(value, Node):
            return places[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(written, value))
        if isinstance(value, dict):
            return tuple((key, written(part)) for key, part in value.items())
        if isinstance(value, slice):
            return "slice", *map(written, (value.start, value.stop, value.step))
        if type(value) is int:
            return "size", str(value)
        return type(value).__name__, repr(value)

    for node in proof.graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            expr = value.node.expr.xreplace(names) if isinstance(value, torch.SymInt) else value
            places[node] = "size", str(expr)
        elif node.op == "call_function" and _changes_nothing(node, names):
            places[node] = places[node.args[0]]
        else:
            places[node] = "node", len(form)
            target = node.name if node.op == "placeholder" else str(node.target)
            if node.op == "get_attr":  # a subgraph: its text, in which names of this graph do not occur
                target = str(getattr(proof.graph_module, target))
            form.append(
                (node.op, target, written(node.args), written(node.kwargs), _shapes(value, names) if shapes else ())
            )
    return form


def _shapes(value: Any, names: dict[Any, Any]) -> tuple[Any, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(_shapes(part, names) for part in value)
    return tuple(str(_expr(size, names)) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def _changes_nothing(node: Node, names: dict[Any, Any]) -> bool:
    """Whether a view has the sizes and strides of its input. `detach` and `alias` take no sizes, and are kept."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(node.args) + len(node.kwargs) < 2 or not isinstance(node.args[0], Node):
        return False
    if len(schema.returns) != 1 or schema.returns[0].alias_info is None or schema.returns[0].alias_info.is_write:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.ndim != after.ndim:
        return False
    if before.dtype != after.dtype or _expr(before.storage_offset(), names) != _expr(after.storage_offset(), names):
        return False
    for d in range(before.ndim):
        size = _expr(before.shape[d], names)
        if size != _expr(after.shape[d], names):
            return False
        if size != 1 and _expr(before.stride(d), names) != _expr(after.stride(d), names):
            return False
    return True


def _expr(size: Any, names: dict[Any, Any]) -> Any:
    return size.node.expr.xreplace(names) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
