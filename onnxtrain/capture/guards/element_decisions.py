"""Python control flow that depends on tensor values: `if mask.all():`, `range(lengths.max().item())`.

A graph has no branches, so it is valid for the calls in which forward takes the same branches. The condition of each
branch is captured as a small graph to the tensor that Python tests, from the arguments and from the module's buffers;
that graph becomes a guard. Its value in this call is computed from what the trace has recorded so far; where that is
not possible, as for a buffer, forward is traced up to the condition, and then again with the answer.

A condition that depends on parameters cannot be checked before the graph runs. Its answer in this call is assumed, as
is that of a test of finite values (`finite_checks`): parameters change little from call to call, and so do buffers, of
which I-BERT tests hundreds.

A condition may also be an expression over data-dependent sizes and items, such as `nonzero(mask).size(0) > 0`. Its
answer is a fact that the rest of the trace, and the proof of the graph, may use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanFunction
from torch.export.exported_program import ExportedProgram
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.node import map_arg

from onnxtrain.capture import source_location
from onnxtrain.capture.guards.assumed_answers import AssumedAnswer
from onnxtrain.capture.guards.decision_graph import MAX_DECISIONS, MAX_OPERATORS, decision_graph
from onnxtrain.capture.guards.finite_checks import answer_if_finite
from onnxtrain.capture.guards.known_values import FixedInput, KnownValues, knowing
from onnxtrain.capture.guards.repeated_items import RepeatedItems
from onnxtrain.capture.guards.sample_ranges import certain_answer
from onnxtrain.capture.guards.shape_proof import same_constant
from onnxtrain.capture.guards.size_decisions import is_by_user
from onnxtrain.capture.guards.traced_graph import Buffer, TracedGraph, TracedState, traced_nodes
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.run_context import untraced
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.patch_points import (
    ASSERT_SIZES,
    EVALUATE_SIZES,
    FAKE_TENSOR_TOLIST,
    TENSOR_BOOL,
    TENSOR_ITEM,
)
from onnxtrain.torch_compat.symbols import (
    is_data_dependent,
    is_float_item,
    python_source,
    symbolic_value,
)

_MAX_ASSUMED = 512  # a loop until something converges may never end; I-BERT with 12 layers has 270
_TENSOR_BOOL = torch.Tensor.__bool__


@dataclass(frozen=True)
class _Condition:
    """An expression over data-dependent sizes and items, and over sizes of inputs.

    Attributes:
        expression: the expression, over the symbols of a trace.
        evaluate: computes its value from the flat inputs of a call and from the values of its data-dependent symbols,
            which the graph of a decision computes in the order of their names.
    """

    expression: sympy.Basic
    evaluate: Callable[[Sequence[torch.Tensor], Sequence[Any]], int]


@dataclass(frozen=True)
class ElementDecision:
    """What Python reads of the tensors that `graph` computes from the arguments.

    Attributes:
        graph: takes `lifted`, then the flat inputs of a call.
        lifted: constants and buffers of the graph; None for a parameter or buffer that it does not read.
        answer: what forward got during the capture: a truth value, or the number if the condition is one.
        where: the source location of the test.
        condition: what is read of the values that the graph computes; None for the truth value of its tensor.
        is_assumed: whether it is no guard: the answer of the captured call is assumed, and checked by each call.
    """

    graph: torch.fx.GraphModule
    lifted: tuple[Any, ...]
    answer: int
    where: str
    condition: _Condition | None = None
    is_assumed: bool = False

    @property
    def is_number(self) -> bool:
        """Whether each number is another graph; else there are two."""
        return self.condition is not None and not _is_truth(self.condition.expression)

    def is_same(self, other: Any) -> bool:
        """Return whether another decision is the same test with the same answer."""
        return (
            isinstance(other, ElementDecision)
            and (self.where, self.answer) == (other.where, other.answer)
            and _without_names(self.graph.graph) == _without_names(other.graph.graph)
            and str(self.condition and self.condition.expression) == str(other.condition and other.condition.expression)
            and all(map(_same_lifted, self.lifted, other.lifted))
        )

    def decides(self, expr: Any) -> bool:
        """Return whether it is a test of this expression."""
        return self.condition is not None and self.condition.expression == expr

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether forward takes the same branch for these inputs."""
        return _read(self.graph, self.lifted, tensors, self.condition) == self.answer


class UndecidedError(BaseException):
    """Forward tests a value without an answer. Not an Exception, so that no handler in forward catches it."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.tensors = tensors


@dataclass(frozen=True)
class _Unanswered:
    """An expression over data-dependent sizes that PyTorch's own code failed to evaluate with `error`."""

    env: ShapeEnv
    expression: sympy.Basic
    error: GuardOnDataDependentSymNode


class ElementDecisions:
    """The decisions of one forward, in execution order.

    Args:
        tensors: the call's tensors.
        fixes_inputs: whether inputs of which forward reads elements as Python numbers are fixed to these elements.
        may_assume: whether tests of finite values have an assumed answer, which each call has to check.
        may_assume_values: whether tests of other values that depend on the module's parameters have one, too.
        with_checks: whether checks of data-dependent sizes in the user's code (`torch._check`) are decisions, too.
            Without them, the graph is for inputs that pass all checks, and does not repeat them.

    Attributes:
        answered: the decisions with an answer.
        unanswered_checks: the number of checks that are no decisions, in the last trace.
        is_undecided: whether the last trace stopped at a decision without one.
        facts: what the answers say of the data-dependent sizes of the last trace.
        reads_elements: whether forward has read an element of a tensor as a Python number or a size.
        values: the known values of the last trace; None if no inputs are fixed.
        assumed: the tests with an assumed answer in the last trace: the tested tensor, and the answer without an index.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        may_assume: bool = False,
        may_assume_values: bool = False,
        with_checks: bool = False,
        fixes_inputs: bool = False,
    ) -> None:
        self.answered: list[ElementDecision] = []
        self.unanswered_checks = 0
        self.reads_elements = False
        self.is_undecided = False
        self.facts: list[sympy.Basic] = []
        self.assumed: list[tuple[torch.Tensor, AssumedAnswer]] = []
        self._tensors = tensors
        self._inputs: Sequence[torch.fx.Node | None] = ()
        self._state: Sequence[TracedState] = ()
        self._items = RepeatedItems()
        self._may_assume = may_assume
        self._may_assume_values = may_assume_values
        self._with_checks = with_checks
        self._fixes_inputs = fixes_inputs
        self.values: KnownValues | None = None
        self._is_telling = False
        self._next = 0
        self._where = ""
        self._expression: Any = None  # that the last trace stopped at; None for a tensor's truth value
        self._unanswered: _Unanswered | None = None
        self._known_answers: dict[sympy.Basic, Any] = {}  # of the current trace

    @property
    def count(self) -> int:
        """The number of tests in the current trace."""
        return self._next + len(self.assumed) + (self.values.reads if self.values is not None else 0)

    @property
    def guards(self) -> list[ElementDecision | FixedInput]:
        """The inputs that are fixed, and the decisions that are guards."""
        fixed = () if self.values is None else self.values.fixed.values()
        return [*fixed, *(decision for decision in self.answered if not decision.is_assumed)]

    @contextmanager
    def answering(self, traced: Sequence[torch.Tensor], state: Sequence[TracedState]) -> Iterator[None]:
        """Answer the tests of forward while this is held.

        Args:
            traced: the call's tensors in the trace.
            state: the module's parameters and buffers in the trace.

        Raises:
            UndecidedError: a test has no answer yet.
        """
        self._next, self.is_undecided, self._unanswered, self.facts = 0, False, None, []
        self.unanswered_checks, self.assumed, self._known_answers = 0, [], {}
        self._inputs, self._state, self._items = traced_nodes(traced), state, RepeatedItems()
        if self._fixes_inputs:
            self._begin_values(traced)
        tracer = proxy_tensor.get_proxy_mode()
        stack = getattr(getattr(tracer, "tracer", None), "module_stack", {})
        depth = len(stack)
        try:
            with (
                knowing(self.values),
                TENSOR_BOOL.replaced_in_thread(self._answer),
                TENSOR_ITEM.replaced_in_thread(partial(self._item, TENSOR_ITEM.original)),
                FAKE_TENSOR_TOLIST.replaced_in_thread(partial(self._tolist, FAKE_TENSOR_TOLIST.original)),
                EVALUATE_SIZES.replaced_in_thread(partial(self._evaluate, EVALUATE_SIZES.original)),
                ASSERT_SIZES.replaced_in_thread(partial(self._check, ASSERT_SIZES.original)),
            ):
                try:
                    yield
                except GuardOnDataDependentSymNode as error:
                    raise self._as_undecided(error) from None
        except UndecidedError:
            while len(stack) > depth:  # the tracer pops a submodule only when it returns
                stack.popitem()
            raise

    def _begin_values(self, traced: Sequence[torch.Tensor]) -> None:
        """Fix the inputs that the last trace has fixed from the beginning: some of its decisions are none any more."""
        if self.has_fixed:
            self.answered = []
        self.values = KnownValues(self._tensors, traced, () if self.values is None else self.values.fixed.values())

    @property
    def has_fixed(self) -> bool:
        """Whether the current trace has fixed further inputs."""
        return self.values is not None and self.values.has_fixed

    def _item(self, original: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Replace `tensor.item()`: forward gets a truth value as from `bool(tensor)`."""
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        value = self._read(tensor)
        if value is not None:
            return original(value)
        return self._answer(tensor) if tensor.dtype == torch.bool else self._items.number(tensor, original)

    def _tolist(self, original: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Replace `tensor.tolist()`, which reads one item after the other."""
        value = self._read(tensor)
        return original(tensor) if value is None else value.tolist()

    def _read(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the elements that forward reads, if inputs may be fixed to those of this call."""
        self.reads_elements = True
        return None if self.values is None else self.values.read(tensor)

    def _answer(self, tensor: torch.Tensor) -> bool:
        """Replace `bool(tensor)`."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.shape.numel() != 1:
            return bool(_TENSOR_BOOL(tensor))
        value = self._read(tensor)
        if value is not None:
            return bool(_TENSOR_BOOL(value))
        certain = certain_answer(tensor)
        if certain is not None:
            return certain
        finite = answer_if_finite(tensor) if self._may_assume else None
        if finite is not None:
            return self._assume(tensor, finite, source_location.of_caller() or "", is_of_finite=True)
        if self._next == len(self.answered):
            where = source_location.of_caller() or ""
            if not self._decide_at_once([tensor], None, where):
                self.is_undecided, self._where, self._expression = True, where, None
                raise UndecidedError(tensor)
        self._next += 1
        decision = self.answered[self._next - 1]
        if decision.is_assumed:
            return self._assume(tensor, bool(decision.answer), decision.where, is_of_finite=False)
        return bool(decision.answer)

    def _assume(self, tensor: torch.Tensor, answer: bool, where: str, *, is_of_finite: bool) -> bool:
        self.assumed.append(((tensor != 0).reshape(()), AssumedAnswer(-1, answer, where, is_of_finite)))
        return answer

    def _evaluate(self, original: Callable[..., Any], env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `ShapeEnv.evaluate_expr`: where it cannot, answer for the values of this call.

        PyTorch's own code may catch the error and take another way. What it tests is a decision only once the error has
        left forward.
        """
        try:
            return original(env, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            self.reads_elements = True
            if expr in self._known_answers:
                return self._known_answers[expr]
            if not _is_decidable(expr):
                raise
            following = self.answered[self._next] if self._next < len(self.answered) else None
            if following is None or not following.decides(expr):
                if following is not None or not is_by_user():
                    self._unanswered = _Unanswered(env, expr, error)
                    raise
                where = source_location.of_caller() or ""
                if not self._decide_at_once(_data_dependent_symbols(expr), expr, where):
                    raise self._undecided(env, expr, where) from None
        self._next += 1
        return self._known(env, expr, self.answered[self._next - 1].answer)

    def _check(self, original: Callable[..., Any], env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace `ShapeEnv.guard_or_defer_runtime_assert`, which `torch._check` calls."""
        if self._is_telling or not _is_decidable(expr) or not is_by_user():
            return original(env, expr, *args, **kwargs)
        if self._with_checks:
            return bool(env.evaluate_expr(expr))
        self.unanswered_checks += 1
        return original(env, expr, *args, **kwargs)

    def _as_undecided(self, error: GuardOnDataDependentSymNode) -> BaseException:
        """Return the error of a decision in place of an error that left forward; the error itself for any other."""
        unanswered = self._unanswered
        if unanswered is None or unanswered.error is not error:
            return error
        return self._undecided(unanswered.env, unanswered.expression, source_location.of_error(error) or "")

    def _known(self, env: ShapeEnv, expr: Any, answer: int) -> Any:
        """Let the rest of the trace know a decision's answer; return it as `ShapeEnv.evaluate_expr` does."""
        if _is_truth(expr):
            value, fact = sympy.sympify(bool(answer)), expr if answer else sympy.Not(expr)
        else:
            value = sympy.Integer(answer)
            fact = sympy.Eq(expr, value, evaluate=False)
        with self._telling():
            env.guard_or_defer_runtime_assert(fact, "forward was captured for this value")
        if not any(map(is_float_item, expr.free_symbols)):  # no size depends on those
            self.facts.append(fact)
        self._known_answers[expr] = value  # PyTorch replaces symbols by it, but no larger expressions
        return value

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Let assertions be facts, not checks of the user's code, while this is held."""
        self._is_telling = True
        try:
            yield
        finally:
            self._is_telling = False

    def _undecided(self, env: ShapeEnv, expr: Any, where: str) -> UndecidedError:
        self.is_undecided, self._where, self._expression = True, where, expr
        return UndecidedError(*map(partial(_as_tensor, env), _data_dependent_symbols(expr)))

    def _decide_at_once(self, read: Sequence[Any], expr: Any, where: str) -> bool:
        """Answer a decision by what is traced so far, so that forward need not be traced again, if that is possible."""
        graph = TracedGraph.of_running_trace(self._inputs, read, self._state)
        if graph is None:
            return False
        try:
            with untraced():
                self._append(graph, expr, where)
        except CaptureError:
            return False  # `decide` can read buffers and constants as well, or says why it cannot answer
        return True

    def decide(self, program: ExportedProgram, exported: torch.nn.Module) -> None:
        """Answer the decision at which the trace stopped, with the value of the tensor that `program` returns.

        Raises:
            CaptureError: the tensor depends on more than the arguments and the buffers of the `exported` module, or
                takes too many operators to compute.
        """
        self._append(TracedGraph.of_program(program, exported), self._expression, self._where)

    def _append(self, traced: TracedGraph, expr: Any, where: str) -> None:
        condition = None if expr is None else _condition(traced.inputs, expr, where)
        guards = sum(not decision.is_assumed for decision in self.answered)
        guard = decision_graph(traced, guards, is_number=expr is not None and not _is_truth(expr))
        is_assumed = bool(guard.obstacle) and expr is None and self._may_assume_values and guard.is_of_module
        if guard.obstacle and (not is_assumed or len(self.answered) >= _MAX_ASSUMED):
            raise _undecidable(guard.obstacle, where)
        answer = _read(guard.graph, guard.values, self._tensors, condition)
        lifted = () if is_assumed else guard.lifted
        self.answered.append(ElementDecision(guard.graph, lifted, answer, where, condition, is_assumed))


def _same_lifted(one: Any, other: Any) -> bool:
    if isinstance(one, Buffer) and isinstance(other, Buffer):  # of the same module, or of one with the same graph
        return one.path == other.path
    return same_constant(one, other)


def _without_names(graph: torch.fx.Graph) -> list[str]:
    index = {node: number for number, node in enumerate(graph.nodes)}
    return [
        f"{node.op} {node.target if node.op != 'placeholder' else ''} {map_arg((node.args, node.kwargs), index.get)}"
        for node in graph.nodes
    ]


def _read(
    graph: torch.fx.GraphModule, lifted: Sequence[Any], tensors: Sequence[torch.Tensor], condition: _Condition | None
) -> int:
    with torch.no_grad():
        values = graph(*(x.value() if isinstance(x, Buffer) else x for x in lifted), *tensors)
        if condition is None:
            return bool(values[0])
        return condition.evaluate(tensors, [v.item() if isinstance(v, torch.Tensor) else v for v in values])


def _data_dependent_symbols(expr: Any) -> list[Any]:
    return sorted((s for s in expr.free_symbols if is_data_dependent(s) or is_float_item(s)), key=str)


def _as_tensor(env: ShapeEnv, symbol: Any) -> torch.Tensor:
    number: Any = symbolic_value(env, symbol)
    return torch.scalar_tensor(number, dtype=torch.int64 if symbol.is_integer else torch.float64)


def _condition(inputs: Sequence[torch.fx.Node], expr: Any, where: str) -> _Condition:
    """Compile an expression over the symbols of a trace, in which `inputs` are the inputs of a call."""
    symbols = _data_dependent_symbols(expr)
    spelled = {symbol: sympy.Symbol(f"values[{i}]", integer=symbol.is_integer) for i, symbol in enumerate(symbols)}
    for i, node in enumerate(inputs):
        for d, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                spelled.setdefault(size.node.expr, sympy.Symbol(f"tensors[{i}].shape[{d}]", integer=True))
    # sympy prints 15 digits, and 17 are exact.
    spelled.update({number: sympy.Symbol(repr(float(number)), real=True) for number in expr.atoms(sympy.Float)})
    spelled_expr = expr.xreplace(spelled)
    if not spelled_expr.free_symbols <= set(spelled.values()):
        raise CaptureError(
            "forward branches in Python on a size that no input has",
            where=where,
            got=str(expr),
            todo="the module runs in PyTorch; branch on a size of an input",
        )
    evaluate: Callable[..., int] = eval(f"lambda tensors, values: {python_source(spelled_expr)}")
    return _Condition(expr, evaluate)


def _is_truth(expr: Any) -> bool:
    return isinstance(expr, Relational | BooleanFunction)


def _is_decidable(expr: Any) -> bool:
    """Return whether a guard computes an expression exactly as forward does: sympy reorders sums of floats."""
    if not isinstance(expr, sympy.Basic) or not _data_dependent_symbols(expr):
        return False
    if not python_source(expr):
        return False
    is_exact = all(s.is_integer for s in expr.free_symbols) and not expr.atoms(sympy.Float)
    if _is_truth(expr):
        return is_exact or (isinstance(expr, Relational) and all(side.is_Atom for side in expr.args))
    return is_exact and bool(expr.is_integer)


def _undecidable(obstacle: str, where: str) -> CaptureError:
    return CaptureError(
        "forward branches in Python on tensor values (data-dependent control flow)",
        where=where,
        expected=f"at most {MAX_DECISIONS} branches, on values that {MAX_OPERATORS} operators compute from inputs and "
        "buffers",
        got=obstacle,
        todo="the module runs in PyTorch; branch on a Python argument, or use torch.where",
    )
