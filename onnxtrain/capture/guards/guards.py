"""The conditions under which a captured graph is valid for a call, compiled into one generated function.

There are three kinds of conditions on sizes:

* Guards of the export: static dimensions, equal sizes. They are *hard*: if one fails, the graph is not for this call.
* Size decisions of the user's code (`size_decisions`). They are hard, too, but another capture may turn out to have the
  same graph at other answers; its decisions are then adopted as an alternative.
* Assumptions of PyTorch's own shape arithmetic: every size is at least 2, a size is not 5, a size is at most 64. They
  are *soft*: PyTorch only chooses between equivalent computations by them, so the graph is valid at other sizes as
  well, if each node has the shape there that the graph says. If a soft condition fails, the graph is checked on fake
  tensors, once for each combination of sizes.

Decisions on tensor values (`element_decisions`) are checked after the sizes. An assumption on a data-dependent size (of
`x[mask]`) cannot be a guard, because its value is unknown before the call runs: such a graph is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture.guards.element_decisions import ElementDecision
from onnxtrain.capture.guards.known_values import FixedInput
from onnxtrain.capture.guards.shape_proof import Proof, same_graph
from onnxtrain.capture.guards.size_decisions import Example, InputDim, SizeDecision, SizeDecisions
from onnxtrain.errors import CaptureError, GraphError
from onnxtrain.torch_compat.symbols import int_oo, python_source, unreplaced_expression

_Sizes: TypeAlias = tuple[tuple[int, ...], ...]
_Binding: TypeAlias = dict[Any, Any]  # from symbols to sizes
_MAX_VERDICTS = 4096  # cached per graph
_UNBOUNDED = 2**31  # PyTorch sometimes writes "no bound" as a large number


class AssumptionError(CaptureError):
    """A graph is valid only for some values of a data-dependent size."""


@dataclass(frozen=True, slots=True)
class _Condition:
    """An expression over the sizes' symbols that has to be true; `where` is the source location of a decision."""

    expr: Any
    soft: bool = False
    where: str = ""

    def holds(self, binding: _Binding) -> bool:
        try:
            value = self.expr.xreplace(binding)
        except ZeroDivisionError:  # a size that is 0 divides another one
            return False
        return value == sympy.true or value is True


@dataclass(frozen=True, slots=True)
class _Alternative:
    """The size decisions of one capture.

    Attributes:
        decisions: all of them; None if unknown.
        forced: those that the other conditions do not imply.
        ones: the dimensions whose size has to be 1, if the alternative was adopted.
    """

    decisions: tuple[_Condition, ...] | None
    forced: tuple[_Condition, ...]
    ones: frozenset[InputDim] = frozenset()


@dataclass(frozen=True)
class StoredGuards:
    """Guards as data that can be stored, without the exported graph.

    Attributes:
        names: the names of the inputs.
        shapes: the sizes of each input, as ints or expressions.
        symbols: the dimension whose size each symbol is.
        conditions: expressions, and whether each is soft.
        proven: the sizes at which a soft condition fails and the graph is valid all the same.
    """

    names: tuple[str, ...]
    shapes: list[list[Any]]
    symbols: dict[Any, InputDim]
    conditions: list[tuple[Any, bool]]
    proven: tuple[_Sizes, ...]


class Guards:
    """The guards of one captured graph: call them with the flat inputs to learn whether the graph is valid.

    Attributes:
        dynamic_dims: the dynamic dimensions of the inputs.
        check: the generated function that `__call__` calls; the caller may call it directly on every step.
        elements: what the user's code decided by tensor values of the inputs.
        items: the numbers among these, by source location.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: list[list[Any]],
        symbols: dict[Any, InputDim],
        conditions: list[_Condition],
        alternative: _Alternative,
        decisions: SizeDecisions | None,
        proof: Proof | None,
        elements: Sequence[ElementDecision | FixedInput] = (),
    ) -> None:
        self.elements = tuple(elements)
        self.items: dict[str, tuple[Any, ...]] = {}
        for decision in elements:
            if decision.is_number:
                self.items[decision.where] = (*self.items.get(decision.where, ()), decision.answer)
        self.dynamic_dims = frozenset(symbols.values())
        self._names = tuple(names)
        self._shapes = shapes
        self._symbols = symbols
        self._conditions = conditions
        self._alternatives = [alternative]
        self._example: Example = {}
        self._captured_sizes: _Sizes = ()  # of the call that was captured
        self._ones: frozenset[InputDim] = frozenset()  # the dimensions of size 1 in that call, but not in the example
        if decisions is not None:
            self._example = {(i, d): decisions.examples[i].shape[d] for i, d in self.dynamic_dims}
            self._captured_sizes = decisions.sizes
            self._ones = decisions.ones
        self._proof = proof
        self._verdicts: dict[_Sizes, bool] = {}
        self.check = self._compile(alternative)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the graph is valid for these inputs, which must have as many dimensions as those captured."""
        return self.check(tensors)

    def explain(self, tensors: Sequence[torch.Tensor]) -> str:
        """Describe the first condition that fails; "" if none does."""
        if self(tensors):
            return ""
        reason = self._reason(_sizes(tensors))
        if reason:
            return reason
        failing = next((decision for decision in self.elements if not decision.holds(tensors)), None)
        return "" if failing is None else f"forward would decide otherwise on tensor values at {failing.where}"

    def suggestion(self, tensors: Sequence[torch.Tensor]) -> Example | None:
        """Return the example sizes for a recapture, if only a size decision excludes these inputs; otherwise None."""
        sizes = _sizes(tensors)
        binding = self._binding(sizes)
        if self._hard_reason(sizes, binding) or self._failing_decision(sizes, binding) is None:
            return None
        return self._example

    def adopt(self, other: Guards) -> bool:
        """Adopt the size decisions of another capture of the same module state, if its graph is the same as this one.

        If dimensions were 1 for the other capture, it is enough that the graphs are the same with those at 1.

        Returns:
            Whether this graph is now valid at the sizes that the other one was captured for.
        """
        sizes = other._captured_sizes
        if [(d.where, d.answer) for d in self.elements] != [(d.where, d.answer) for d in other.elements]:
            return False
        if self.dynamic_dims != other.dynamic_dims or other._alternatives[0].decisions is None:
            return False
        if self._proof is None or other._proof is None:
            return False
        if self._hard_reason(sizes, self._binding(sizes)):
            return False
        ones = next((ones for ones in (frozenset(), other._ones) if same_graph(self._proof, other._proof, ones)), None)
        if ones is None:
            return False
        self._alternatives.append(replace(other._alternatives[0], ones=ones))
        self._verdicts.clear()
        # The generated function is fast for one alternative: that for sizes above 1.
        general = min(self._alternatives, key=lambda a: (len(a.ones), len(a.forced)))
        self.check = self._compile(general)
        return not self._reason(sizes)

    def refuse_assumptions(self, examples: Sequence[torch.Tensor]) -> None:
        """Refuse a graph that is valid only for some values of a data-dependent size.

        Args:
            examples: the inputs that the graph was exported with.

        Raises:
            AssumptionError: says what the graph assumes.
        """
        if self._proof is None or not self._proof.data_dependent:
            return
        sizes: list[list[Any]] = [list(example.shape) for example in examples]
        binding = {symbol: sympy.Integer(sizes[i][d].node.hint) for symbol, (i, d) in self._symbols.items()}
        reason = self._proof.reason(binding)
        if reason:
            raise AssumptionError(
                "the graph would be valid only for certain numbers of selected elements",
                got=reason,
                todo="the module runs in PyTorch; compute on all elements with a mask instead of selecting some, "
                "or use an op whose result has a fixed size, such as one_hot(x, n).sum(0) for bincount",
            )

    def same_graph(self, other: Guards) -> bool:
        """Return whether the captured graphs compute the same at all sizes."""
        if self._proof is None or other._proof is None or len(self.elements) != len(other.elements):
            return False
        if not all(a.is_same(b) for a, b in zip(self.elements, other.elements, strict=True)):
            return False
        if self._fixed_expressions() != other._fixed_expressions():
            return False
        return self.dynamic_dims == other.dynamic_dims and same_graph(
            self._proof, other._proof, frozenset(), shapes=True
        )

    def _fixed_expressions(self) -> set[Any]:
        """Return the conditions that fix an expression to a number, which the converted graph has in its place."""
        variables = {symbol: sympy.Symbol(f"s{i}_{d}", integer=True) for symbol, (i, d) in self._symbols.items()}
        equalities = (c.expr for c in self._conditions if isinstance(c.expr, sympy.Eq))
        return {expr.xreplace(variables) for expr in equalities if any(side.is_Integer for side in expr.args)}

    @property
    def exported(self) -> Proof | None:
        """The exported graph; None if the capture was loaded from disk."""
        return self._proof

    # Storing

    def to_stored(self) -> StoredGuards:
        """Return the part of the guards that is valid in other processes."""
        forced = [(condition.expr, False) for condition in self._alternatives[0].forced]
        conditions = [*((c.expr, c.soft) for c in self._conditions), *forced]
        proven = tuple(sizes for sizes, verdict in self._verdicts.items() if verdict)
        return StoredGuards(self._names, self._shapes, self._symbols, conditions, proven)

    @classmethod
    def from_stored(cls, stored: StoredGuards) -> Guards:
        """Make guards that hold where all stored conditions do, and at the sizes that were proven."""
        conditions = [_Condition(expr, soft) for expr, soft in stored.conditions]
        guards = cls(stored.names, stored.shapes, stored.symbols, conditions, _Alternative(None, ()), None, None)
        guards._verdicts.update(dict.fromkeys(stored.proven, True))
        return guards

    # The generated function

    def _compile(self, alternative: _Alternative) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Generate a function that is fast if all conditions hold; otherwise it calls `_slow_check`, which caches."""
        variables = {symbol: sympy.Symbol(f"s{i}_{d}", integer=True) for symbol, (i, d) in self._symbols.items()}
        lines = ["def check(tensors):"]
        tests: list[str] = []
        for i, shape in enumerate(self._shapes):
            if shape:
                lines.append(f"    {', '.join(f's{i}_{d}' for d in range(len(shape)))}, = tensors[{i}].shape")
            tests += [f"s{i}_{d} == {size}" for d, size in enumerate(shape) if isinstance(size, int)]
        for condition in (*self._conditions, *alternative.forced):
            tests.append(
                python_source(condition.expr.xreplace(variables)) or "False"
            )  # "False" leaves it to the slow check
        sizes = f"{' and '.join(dict.fromkeys(tests)) or 'True'} or slow_check(tensors)"
        elements = " and elements_hold(tensors)" if self.elements else ""
        # A condition may divide by a size that is 0 in this call: for the slow check, it does not hold.
        lines += ["    try:", f"        return ({sizes}){elements}"]
        lines += ["    except ZeroDivisionError:", f"        return slow_check(tensors){elements}"]
        scope: dict[str, Any] = {"slow_check": self._slow_check, "elements_hold": self._elements_hold}
        exec(compile("\n".join(lines), "<onnxtrain guards>", "exec"), scope)
        check: Callable[[Sequence[torch.Tensor]], bool] = scope["check"]
        return check

    def _elements_hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(decision.holds(tensors) for decision in self.elements)

    def _slow_check(self, tensors: Sequence[torch.Tensor]) -> bool:
        sizes = _sizes(tensors)
        verdict = self._verdicts.get(sizes)
        if verdict is None:
            verdict = not self._reason(sizes)
            if len(self._verdicts) >= _MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[sizes] = verdict
        return verdict

    # The slow check

    def _reason(self, sizes: _Sizes) -> str:
        """Say why the graph is not valid at these sizes; "" if it is."""
        binding = self._binding(sizes)
        hard = self._hard_reason(sizes, binding)
        if hard:
            return hard
        decision = self._failing_decision(sizes, binding)
        if decision is not None:
            condition = f"{self._spell(decision.expr)} at {decision.where}"
            return f"forward would decide otherwise on {condition} for {self._values(decision.expr, binding)}"
        soft = next((condition for condition in self._conditions if not condition.holds(binding)), None)
        if soft is None:
            return ""
        if self._alternatives[0].decisions is None or self._proof is None:
            return f"{self._spell(soft.expr)} does not hold, and the size decisions of forward are not known"
        return self._proof.reason(binding)

    def _hard_reason(self, sizes: _Sizes, binding: _Binding) -> str:
        for i, shape in enumerate(self._shapes):
            for d, size in enumerate(shape):
                if isinstance(size, int) and sizes[i][d] != size:
                    return f"{self._names[i]}.size({d}) is {sizes[i][d]}, and was {size} at the capture"
        for symbol, size in binding.items():
            if size < 1:
                return f"{self._size_name(symbol)} is {size}"
        for condition in self._conditions:
            if not condition.soft and not condition.holds(binding):
                return f"{self._spell(condition.expr)} does not hold for {self._values(condition.expr, binding)}"
        return ""

    def _binding(self, sizes: _Sizes) -> _Binding:
        return {symbol: sympy.Integer(sizes[i][d]) for symbol, (i, d) in self._symbols.items()}

    def _failing_decision(self, sizes: _Sizes, binding: _Binding) -> _Condition | None:
        """Return a decision with another answer at these sizes; None if all decisions of some alternative hold."""
        failing: _Condition | None = None
        for alternative in self._alternatives:
            condition = next((c for c in alternative.decisions or () if not c.holds(binding)), None)
            if condition is None and all(sizes[i][d] == 1 for i, d in alternative.ones):
                return None
            failing = failing or condition
        return failing

    # Messages

    def _size_name(self, symbol: Any) -> str:
        i, d = self._symbols[symbol]
        return f"{self._names[i]}.size({d})"

    def _spell(self, expr: Any) -> str:
        named = expr.xreplace({s: sympy.Symbol(self._size_name(s), integer=True) for s in expr.free_symbols})
        return python_source(named) or str(named)

    def _values(self, expr: Any, binding: _Binding) -> str:
        symbols = sorted(expr.free_symbols, key=self._size_name)
        return ", ".join(f"{self._size_name(symbol)} = {binding[symbol]}" for symbol in symbols)


def _sizes(tensors: Sequence[torch.Tensor]) -> _Sizes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def compile_guards(
    program: ExportedProgram,
    names: Sequence[str],
    decisions: SizeDecisions | None = None,
    traced: ExportedProgram | None = None,
    elements: Sequence[ElementDecision | FixedInput] = (),
    facts: Sequence[Any] = (),
) -> Guards:
    """Compile the guards of an export.

    Args:
        program: the functionalized export of a function of a flat list of tensors.
        names: the name of each of those tensors in messages.
        decisions: what the user's code decided from sizes. Without them, the guards hold only at the sizes that
            PyTorch assumed, 2 and more.
        traced: the export before functionalization, if that traced it once more: `tensor_split(x, 2)` is decomposed
            for an even size.
        elements: what the user's code decided by tensor values of the inputs.
        facts: what these decisions say of data-dependent sizes.

    Raises:
        AssumptionError: the graph is valid only for some values of a data-dependent size.
    """
    user_inputs = [s.arg.name for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    symbols: dict[Any, InputDim] = {}
    shapes: list[list[Any]] = []
    equalities: list[_Condition] = []
    env: ShapeEnv | None = None
    for i, name in enumerate(user_inputs):
        shape: list[Any] = []
        for d, size in enumerate(values[name].shape):
            static = size if isinstance(size, int) else size.node.maybe_as_int()
            shape.append(size.node.expr if static is None else static)
            if isinstance(size, torch.SymInt) and static is None:
                env = size.node.shape_env
                symbol = unreplaced_expression(size)
                if not symbol.is_Symbol:
                    raise GraphError(
                        "torch.export gave a dynamic dimension of an input an expression as its size",
                        where=f"dimension {d} of input {name}",
                        expected="one symbol",
                        got=str(symbol),
                        todo="the module runs in PyTorch; this is a bug of onnxtrain: please report it",
                    )
                symbols[symbol] = (i, d)
                if symbol != size.node.expr:
                    equalities.append(_Condition(sympy.Eq(symbol, size.node.expr, evaluate=False)))
        shapes.append(shape)
    # The bounds come first, because later conditions may divide by a size.
    conditions = [*(_export_conditions(env, symbols, shapes) if env is not None else ()), *equalities]
    alternative = _alternative(decisions, symbols)
    proof = Proof(program, symbols, traced, facts)
    guards = Guards(names, shapes, symbols, conditions, alternative, decisions, proof, elements)
    guards.refuse_assumptions([values[name] for name in user_inputs])
    return guards


def _export_conditions(env: ShapeEnv, symbols: dict[Any, InputDim], shapes: list[list[Any]]) -> list[_Condition]:
    """Return the ranges and guards that the export recorded, each once."""
    conditions: dict[Any, _Condition] = {}
    free = {s for shape in shapes for size in shape if not isinstance(size, int) for s in size.free_symbols}
    for symbol in sorted(free, key=str):
        bounds = env.var_to_range[symbol]
        lower = sympy.Ge(symbol, max(1, int(bounds.lower)), evaluate=False)
        conditions[lower] = _Condition(lower, soft=True)
        if bounds.upper is not int_oo and bounds.upper != sympy.oo and int(bounds.upper) < _UNBOUNDED:
            upper = sympy.Le(symbol, int(bounds.upper), evaluate=False)
            conditions[upper] = _Condition(upper, soft=True)
    for guard in env.guards:
        if guard.expr.free_symbols and guard.expr.free_symbols <= symbols.keys():
            soft = isinstance(guard.expr, (sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
            conditions.setdefault(guard.expr, _Condition(guard.expr, soft))
    return list(conditions.values())


def _alternative(decisions: SizeDecisions | None, symbols: dict[Any, InputDim]) -> _Alternative:
    if decisions is None:
        return _Alternative(None, ())
    on_inputs = [d for d in decisions.recorded.values() if d.expr.free_symbols <= symbols.keys()]
    conditions = [_Condition(_as_condition(d), where=d.where) for d in on_inputs]
    forced = tuple(c for c, d in zip(conditions, on_inputs, strict=True) if d.forced)
    return _Alternative(tuple(conditions), forced)


def _as_condition(decision: SizeDecision) -> Any:
    if not isinstance(decision.expr, (Relational, BooleanFunction)):
        return sympy.Eq(decision.expr, decision.value, evaluate=False)
    return decision.expr if decision.value else sympy.Not(decision.expr)
