"""The conditions on sizes under which a captured graph is right, as one generated function.

There are three kinds:

* What the export needs to be so: fixed sizes, equal sizes. *Hard*: where one fails, the graph is not for this call.
* What the user's code decided from sizes (`capture.decisions`). Hard too, but another capture may turn out to be the
  same graph at such sizes; it is then adopted as an alternative, and its decisions are as good.
* What PyTorch assumed for its own shape arithmetic: every size is at least 2, a size is not 5, at most 64. *Soft*:
  its choices are between equivalent ways, so that the graph is right at other sizes as well, if only each node has the
  shape there that the graph says. Where a soft condition fails, that is tried out on fake tensors, once for each
  combination of sizes.

What is assumed of a size that only the elements tell (of `x[mask]`) is no condition on a call: there may be none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom, BooleanFunction
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture.guards.element_decisions import ElementDecision
from onnxtrain.capture.guards.shape_proof import Proof, same_graph
from onnxtrain.capture.guards.size_decisions import Decision, Decisions, Example, Place
from onnxtrain.errors import CaptureError, GraphError
from onnxtrain.torch_compat.symbols import PythonPrinter, functions, int_oo, unreplaced_expression

_Sizes: TypeAlias = tuple[tuple[int, ...], ...]
_Binding: TypeAlias = dict[Any, Any]  # from symbols to sizes
_KNOWN_SIZES = 4096
_EXACT_IN_PYTHON = (
    *(
        sympy.Symbol,
        sympy.Integer,
        sympy.Add,
        sympy.Mul,
        sympy.Max,
        sympy.Min,
        Relational,
        BooleanFunction,
        BooleanAtom,
    ),
    *(getattr(functions, name) for name in ("FloorDiv", "Mod", "PythonMod", "CleanDiv") if hasattr(functions, name)),
)
_UNBOUNDED = 2**31  # PyTorch writes "no bound" as a large number in places


@dataclass(frozen=True, slots=True)
class _Condition:
    """`expr` over the sizes' symbols has to be true."""

    expr: Any
    soft: bool = False
    where: str = ""

    def holds(self, binding: _Binding) -> bool:
        value = self.expr.xreplace(binding)
        return value == sympy.true or value is True


@dataclass(frozen=True, slots=True)
class _Alternative:
    """The decisions of one capture; None if unknown. Those in `forced` do not follow from the other conditions."""

    decisions: tuple[_Condition, ...] | None
    forced: tuple[_Condition, ...]
    ones: frozenset[Place] = frozenset()  # places whose size has to be 1, if this was adopted


@dataclass(frozen=True)
class KeptGuards:
    """Guards without the graph that they are about.

    Attributes:
        names: of the inputs.
        shapes: for each input, its sizes as ints or expressions.
        symbols: where each symbol of the expressions is the size.
        conditions: expressions, and whether each is soft.
        proven: the sizes at which a soft condition fails and the graph is right all the same.
    """

    names: tuple[str, ...]
    shapes: list[list[Any]]
    symbols: dict[Any, Place]
    conditions: list[tuple[Any, bool]]
    proven: tuple[_Sizes, ...]


class Guards:
    """Whether a captured graph is right for tensors of these sizes. Call it with the flat inputs of a call.

    Attributes:
        open: the places (tensor, dimension) whose size is free.
        check: what a call of this object does, without a call in between: it runs on every step.
        elements: what the user's code decided from elements of the inputs.
    """

    def __init__(
        self,
        names: Sequence[str],
        shapes: list[list[Any]],
        symbols: dict[Any, Place],
        conditions: list[_Condition],
        alternative: _Alternative,
        decisions: Decisions | None,
        proof: Proof | None,
        elements: Sequence[ElementDecision] = (),
    ) -> None:
        self.elements = tuple(elements)
        self.open = frozenset(symbols.values())
        self._names = tuple(names)
        self._shapes = shapes
        self._symbols = symbols
        self._conditions = conditions
        self._alternatives = [alternative]
        self._example: Example = {}
        self._made_for: _Sizes = ()
        self._ones: frozenset[Place] = frozenset()  # the places that were 1 then, though not in the example
        if decisions is not None:
            self._example = {(i, d): decisions.examples[i].shape[d] for i, d in self.open}
            self._made_for = decisions.sizes
            self._ones = decisions.ones
        self._proof = proof
        self._verdicts: dict[_Sizes, bool] = {}
        self.check = self._compile(alternative)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the graph is right for these inputs, whose numbers of dimensions are as captured."""
        return self.check(tensors)

    def explain(self, tensors: Sequence[torch.Tensor]) -> str:
        """The condition that fails, in words; "" if none does."""
        if self(tensors):
            return ""
        reason = self._reason(_sizes(tensors))
        other = next((decision for decision in self.elements if reason or not decision.holds(tensors)), None)
        return reason if reason or other is None else f"forward would decide otherwise on elements at {other.where}"

    def suggestion(self, tensors: Sequence[torch.Tensor]) -> Example | None:
        """The example sizes to capture again with, if the graph is wrong here for a decision's sake only."""
        sizes = _sizes(tensors)
        binding = self._binding(sizes)
        if self._hard_reason(sizes, binding) or self._failing_decision(sizes, binding) is None:
            return None
        return self._example

    def adopt(self, other: Guards) -> bool:
        """Takes over the decisions of another capture of the same module state, if its graph is the same as this one.

        Where sizes were 1 for the other, the graphs need only be the same at such sizes. False where this graph is not
        right all the same at the sizes that the other was captured for.
        """
        sizes = other._made_for
        if [(d.where, d.answer) for d in self.elements] != [(d.where, d.answer) for d in other.elements]:
            return False
        if self.open != other.open or other._alternatives[0].decisions is None:
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
        # The function answers at once for the alternative that is for sizes above 1.
        general = min(self._alternatives, key=lambda a: (len(a.ones), len(a.forced)))
        self.check = self._compile(general)
        return not self._reason(sizes)

    def refuse_assumptions(self, examples: Sequence[torch.Tensor]) -> None:
        """Raises CaptureError where something is assumed of a size that only the elements tell.

        Args:
            examples: the inputs that the graph was exported with.
        """
        if self._proof is None or not self._proof.unknown:
            return
        sizes: list[list[Any]] = [list(example.shape) for example in examples]
        binding = {symbol: sympy.Integer(sizes[i][d].node.hint) for symbol, (i, d) in self._symbols.items()}
        reason = self._proof.reason(binding)
        if reason:
            raise CaptureError(
                "the graph would only be right for some numbers of selected elements",
                got=reason,
                todo="the module runs in PyTorch; compute with a mask on all elements instead of selecting some",
            )

    def same_graph(self, other: Guards) -> bool:
        """Whether the captured graphs do the same at all sizes."""
        if self._proof is None or other._proof is None or self.elements or other.elements:
            return False
        return self.open == other.open and same_graph(self._proof, other._proof, frozenset(), shapes=True)

    @property
    def exported(self) -> Proof | None:
        """The exported graph; None where the capture was read from disk."""
        return self._proof

    # On disk

    def kept(self) -> KeptGuards:
        """What of the guards is true in another process as well."""
        forced = [(condition.expr, False) for condition in self._alternatives[0].forced]
        conditions = [*((c.expr, c.soft) for c in self._conditions), *forced]
        proven = tuple(sizes for sizes, verdict in self._verdicts.items() if verdict)
        return KeptGuards(self._names, self._shapes, self._symbols, conditions, proven)

    @classmethod
    def of(cls, kept: KeptGuards) -> Guards:
        """Guards that were kept. They hold where all conditions do, and at the sizes that were proven."""
        conditions = [_Condition(expr, soft) for expr, soft in kept.conditions]
        guards = cls(kept.names, kept.shapes, kept.symbols, conditions, _Alternative(None, ()), None, None)
        guards._verdicts.update(dict.fromkeys(kept.proven, True))
        return guards

    # The generated function

    def _compile(self, alternative: _Alternative) -> Callable[[Sequence[torch.Tensor]], bool]:
        """True where everything holds; anything else takes the long way, whose answers are kept."""
        variables = {symbol: sympy.Symbol(f"s{i}_{d}", integer=True) for symbol, (i, d) in self._symbols.items()}
        lines = ["def check(tensors):"]
        tests: list[str] = []
        for i, shape in enumerate(self._shapes):
            if shape:
                lines.append(f"    {', '.join(f's{i}_{d}' for d in range(len(shape)))}, = tensors[{i}].shape")
            tests += [f"s{i}_{d} == {size}" for d, size in enumerate(shape) if isinstance(size, int)]
        for condition in (*self._conditions, *alternative.forced):
            tests.append(_python(condition.expr.xreplace(variables)) or "False")  # False: the long way
        sizes = f"{' and '.join(dict.fromkeys(tests)) or 'True'} or otherwise(tensors)"
        lines.append(f"    return ({sizes}) and decided(tensors)" if self.elements else f"    return {sizes}")
        values: dict[str, Any] = {"otherwise": self._otherwise, "decided": self._decides_alike}
        exec(compile("\n".join(lines), "<onnxtrain guards>", "exec"), values)
        check: Callable[[Sequence[torch.Tensor]], bool] = values["check"]
        return check

    def _decides_alike(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(decision.holds(tensors) for decision in self.elements)

    def _otherwise(self, tensors: Sequence[torch.Tensor]) -> bool:
        sizes = _sizes(tensors)
        verdict = self._verdicts.get(sizes)
        if verdict is None:
            verdict = not self._reason(sizes)
            if len(self._verdicts) >= _KNOWN_SIZES:
                self._verdicts.clear()
            self._verdicts[sizes] = verdict
        return verdict

    # The long way

    def _reason(self, sizes: _Sizes) -> str:
        """The first condition that makes the graph wrong at these sizes, in words; "" if there is none."""
        binding = self._binding(sizes)
        hard = self._hard_reason(sizes, binding)
        if hard:
            return hard
        decision = self._failing_decision(sizes, binding)
        if decision is not None:
            words = f"{self._words(decision.expr)} at {decision.where}"
            return f"forward would decide otherwise on {words} for {self._given(decision.expr, binding)}"
        soft = next((condition for condition in self._conditions if not condition.holds(binding)), None)
        if soft is None:
            return ""
        if self._alternatives[0].decisions is None or self._proof is None:
            return f"{self._words(soft.expr)} does not hold, and what forward decided from sizes is not known"
        return self._proof.reason(binding)

    def _hard_reason(self, sizes: _Sizes, binding: _Binding) -> str:
        for i, shape in enumerate(self._shapes):
            for d, size in enumerate(shape):
                if isinstance(size, int) and sizes[i][d] != size:
                    return f"{self._names[i]}.size({d}) is {sizes[i][d]}, and it was {size}"
        for symbol, size in binding.items():
            if size < 1:
                return f"{self._word(symbol)} is {size}"
        for condition in self._conditions:
            if not condition.soft and not condition.holds(binding):
                return f"{self._words(condition.expr)} does not hold for {self._given(condition.expr, binding)}"
        return ""

    def _binding(self, sizes: _Sizes) -> _Binding:
        return {symbol: sympy.Integer(sizes[i][d]) for symbol, (i, d) in self._symbols.items()}

    def _failing_decision(self, sizes: _Sizes, binding: _Binding) -> _Condition | None:
        """A decision that is other at these sizes; None if there is an alternative with none."""
        failing: _Condition | None = None
        for alternative in self._alternatives:
            wrong = next((c for c in alternative.decisions or () if not c.holds(binding)), None)
            if wrong is None and all(sizes[i][d] == 1 for i, d in alternative.ones):
                return None
            failing = failing or wrong
        return failing

    # Words

    def _word(self, symbol: Any) -> str:
        i, d = self._symbols[symbol]
        return f"{self._names[i]}.size({d})"

    def _words(self, expr: Any) -> str:
        named = expr.xreplace({s: sympy.Symbol(self._word(s), integer=True) for s in expr.free_symbols})
        return _python(named) or str(named)

    def _given(self, expr: Any, binding: _Binding) -> str:
        return ", ".join(f"{self._word(s)} = {binding[s]}" for s in sorted(expr.free_symbols, key=self._word))


def _sizes(tensors: Sequence[torch.Tensor]) -> _Sizes:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def compile_guards(
    program: ExportedProgram,
    names: Sequence[str],
    decisions: Decisions | None = None,
    traced: ExportedProgram | None = None,
    elements: Sequence[ElementDecision] = (),
) -> Guards:
    """The guards of an export.

    Args:
        program: what torch.export made of a function of a flat list of tensors, functionalized.
        names: what to call each of those tensors in messages.
        decisions: what the user's code decided from sizes. Without it, the guards hold only at sizes that PyTorch
            assumed as well: 2 and more.
        traced: what was exported, where functionalization traced that once more: `tensor_split(x, 2)` is decomposed
            for an even size.
        elements: what it decided from elements of the inputs.

    Raises:
        CaptureError: the graph is right only if a size has some value that only the elements of a tensor tell.
    """
    user_inputs = [s.arg.name for s in program.graph_signature.input_specs if s.kind == InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    symbols: dict[Any, Place] = {}
    shapes: list[list[Any]] = []
    equal: list[_Condition] = []
    env: ShapeEnv | None = None
    for i, name in enumerate(user_inputs):
        shape: list[Any] = []
        for d, size in enumerate(values[name].shape):
            known = size if isinstance(size, int) else size.node.maybe_as_int()
            shape.append(size.node.expr if known is None else known)
            if isinstance(size, torch.SymInt) and known is None:
                env = size.node.shape_env
                own = unreplaced_expression(size)
                if not own.is_Symbol:
                    raise GraphError("an input's size is not a symbol", got=str(own))
                symbols[own] = (i, d)
                if own != size.node.expr:
                    equal.append(_Condition(sympy.Eq(own, size.node.expr, evaluate=False)))
        shapes.append(shape)
    # The bounds come first: what follows may divide by a size.
    conditions = [*(_of_environment(env, symbols, shapes) if env is not None else ()), *equal]
    alternative = _alternative(decisions, symbols)
    proof = Proof(program, symbols, traced)
    guards = Guards(names, shapes, symbols, conditions, alternative, decisions, proof, elements)
    guards.refuse_assumptions([values[name] for name in user_inputs])
    return guards


def _of_environment(env: ShapeEnv, symbols: dict[Any, Place], shapes: list[list[Any]]) -> list[_Condition]:
    """The ranges and guards of the export, once each."""
    found: dict[Any, _Condition] = {}
    free = {s for shape in shapes for size in shape if not isinstance(size, int) for s in size.free_symbols}
    for symbol in sorted(free, key=str):
        bounds = env.var_to_range[symbol]
        lower = sympy.Ge(symbol, max(1, int(bounds.lower)), evaluate=False)
        found[lower] = _Condition(lower, soft=True)
        if bounds.upper is not int_oo and bounds.upper != sympy.oo and int(bounds.upper) < _UNBOUNDED:
            upper = sympy.Le(symbol, int(bounds.upper), evaluate=False)
            found[upper] = _Condition(upper, soft=True)
    for guard in env.guards:
        if guard.expr.free_symbols and guard.expr.free_symbols <= symbols.keys():
            soft = isinstance(guard.expr, (sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
            found.setdefault(guard.expr, _Condition(guard.expr, soft))
    return list(found.values())


def _alternative(decisions: Decisions | None, symbols: dict[Any, Place]) -> _Alternative:
    if decisions is None:
        return _Alternative(None, ())
    made = [d for d in decisions.made.values() if d.expr.free_symbols <= symbols.keys()]
    conditions = [_Condition(_as_condition(d), where=d.where) for d in made]
    forced = tuple(c for c, d in zip(conditions, made, strict=True) if d.forced)
    return _Alternative(tuple(conditions), forced)


def _as_condition(decision: Decision) -> Any:
    if not isinstance(decision.expr, (Relational, BooleanFunction)):
        return sympy.Eq(decision.expr, decision.value, evaluate=False)
    return decision.expr if decision.value else sympy.Not(decision.expr)


def _python(expr: Any) -> str:
    """Python's spelling of integer arithmetic; "" for anything else."""
    if not all(isinstance(part, _EXACT_IN_PYTHON) for part in sympy.preorder_traversal(expr)):
        return ""
    return f"({PythonPrinter().doprint(expr)})"
