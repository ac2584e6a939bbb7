"""Find how the sizes of a custom function's outputs depend on those of its inputs.

In most cases a run on fake tensors with symbolic sizes shows it. If such a run is not possible, or specializes on a
size (forward calls `int` on it, or needs tensors with elements), the function runs at several sizes, and a rule is
deduced: `2 * s0`, `s0 * s1 + 1`. Every later run is checked against the rule, which therefore is never silently wrong.
The user's `infer_shape` takes precedence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
import sympy
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture import source_location
from onnxtrain.capture.python_functions.trial_run import CallArguments, TrialRun, try_call
from onnxtrain.errors import CaptureError
from onnxtrain.ops.dtypes import ONNX_DTYPES, TORCH_DTYPES
from onnxtrain.ops.python_function.call import Output, ShapeRule, line_of, qualified_name
from onnxtrain.ops.python_function.template import Sizes, Slot
from onnxtrain.torch_compat.fake_tensors import without_fakes
from onnxtrain.torch_compat.modes import TorchDispatchMode

# Specialization: whether a run on symbolic sizes is valid at other sizes

_EVALUATE = ShapeEnv.evaluate_expr


class _Specialization:
    """`happened`: whether a symbolic size was converted to a number."""

    happened = False


@contextmanager
def record_specialization() -> Iterator[_Specialization]:
    """Record whether code in this context specializes on a size, without adding a guard: it runs again every time."""
    specialization = _Specialization()

    def evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        with env.suppress_guards():
            value = _EVALUATE(env, expr, *args, **kwargs)
        if getattr(expr, "free_symbols", None) and _specializes(expr, value):
            specialization.happened = True
        return value

    before = ShapeEnv.evaluate_expr
    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign, assignment]  # also replaces a recording of decisions
    try:
        yield specialization
    finally:
        ShapeEnv.evaluate_expr = before  # type: ignore[method-assign]


def _specializes(expr: Any, value: Any) -> bool:
    """Return whether evaluating `expr` to `value` fixes a size: a number, or an equality with a number that holds."""
    if not isinstance(expr, (sympy.logic.boolalg.Boolean, sympy.core.relational.Relational)):
        return True
    is_equality = isinstance(expr, sympy.Eq) == bool(value) and isinstance(expr, (sympy.Eq, sympy.Ne))
    return is_equality and any(side.is_number for side in expr.args)


# Rules


@dataclass(frozen=True, slots=True)
class _SizeSource:
    """A dimension of an input, or if `tensor` is -1 a size argument; `index` is that of the dimension or argument."""

    tensor: int
    index: int

    def evaluate(self, shapes: Sequence[Sizes], sizes: Sizes) -> Any:
        return sizes[self.index] if self.tensor < 0 else shapes[self.tensor][self.index]


@dataclass(frozen=True, slots=True)
class _Term:
    """The expression factor * product of the sources + offset."""

    factor: int
    sources: tuple[_SizeSource, ...]
    offset: int

    def evaluate(self, shapes: Sequence[Sizes], sizes: Sizes) -> Any:
        value: Any = self.factor
        for source in self.sources:
            value = value * source.evaluate(shapes, sizes)
        return value + self.offset if self.offset else value


@dataclass(frozen=True, slots=True)
class _DeducedRule:
    """A rule deduced from runs of the function; `outputs` has a term for each dimension of each output."""

    outputs: tuple[tuple[_Term, ...], ...]

    def __call__(self, shapes: Sequence[Sizes], sizes: Sizes) -> list[list[Any]]:
        return [[term.evaluate(shapes, sizes) for term in terms] for terms in self.outputs]


@dataclass(frozen=True)
class _DeclaredRule:
    """The user's `infer_shape` as a rule.

    Attributes:
        infer: the user's function.
        name: the name of the custom function.
        node: the serialized NodeProto to call `infer` with.
        dtypes: the ONNX dtypes of the inputs.
    """

    infer: Callable[..., Any]
    name: str
    node: bytes
    dtypes: tuple[int, ...]

    def __call__(self, shapes: Sequence[Sizes], sizes: Sizes) -> list[list[Any]]:
        return [list(shape) for shape in self.infer_outputs(shapes)[0]]

    def infer_outputs(self, shapes: Sequence[Sizes]) -> tuple[list[Any], list[Any]]:
        """Return the shapes and the dtypes of the outputs.

        Raises:
            CaptureError: the user's function did not return them.
        """
        node = onnx.NodeProto.FromString(self.node)
        try:
            output_shapes, dtypes = self.infer(node, [list(shape) for shape in shapes], list(self.dtypes))
        except (TypeError, ValueError) as error:
            raise self._error("two lists, of shapes and of dtypes", repr(error)) from error
        if len(output_shapes) != len(dtypes) or any(
            isinstance(size, str) or size is None for shape in output_shapes for size in shape
        ):
            raise self._error("two lists of equal length, of shapes and of dtypes", (output_shapes, dtypes))
        return list(output_shapes), list(dtypes)

    def _error(self, expected: str, got: object) -> CaptureError:
        return CaptureError(
            f"infer_shape of {self.name} did not return the shapes and dtypes of the outputs",
            where=line_of(self, "infer"),
            expected=expected,
            got=got,
            todo="compute each size of the outputs from the inputs' sizes, which are ints or symbolic ints",
        )


def node_proto(name: str, inputs: int) -> onnx.NodeProto:
    """Make the node that `infer_shape` and `alias_input` are called with, which does not have its outputs yet."""
    names = [f"input_{i}" for i in range(inputs)]
    return onnx.helper.make_node("PythonOp", names, ["context"], domain="com.microsoft", func_name=name)


def declared_rule(call: CallArguments, run: TrialRun | None, infer: Callable[..., Any]) -> tuple[TrialRun, ShapeRule]:
    """Make a rule of the user's `infer_shape`.

    Args:
        call: the function and its arguments.
        run: the trial run; None if the function does not run on fake tensors.
        infer: the user's `infer_shape`.

    Returns:
        The trial run, or one made up from the inferred outputs; and the rule.

    Raises:
        CaptureError: `infer` does not return the shapes and dtypes of forward's outputs.
    """
    name = qualified_name(call.function)
    node = node_proto(name, len(call.tensors))
    input_dtypes = tuple(int(ONNX_DTYPES[call_input.dtype]) for call_input in call.inputs)
    rule = _DeclaredRule(infer, name, node.SerializeToString(), input_dtypes)
    shapes, dtypes = rule.infer_outputs([tensor.shape for tensor in call.tensors])
    if run is not None:
        if len(shapes) != len(run.outputs):
            raise CaptureError(
                f"infer_shape of {name} returned the wrong number of outputs",
                where=line_of(call.function, "infer_shape"),
                expected=f"{len(run.outputs)}, the number of tensors that forward returns",
                got=len(shapes),
                todo="return two lists: for each output its shape, and for each output its dtype",
            )
        return run, rule
    return _inferred_run(call, shapes, dtypes), rule


def _inferred_run(call: CallArguments, shapes: Sequence[Sizes], dtypes: Sequence[Any]) -> TrialRun:
    """Make up a trial run from the shapes and dtypes of the outputs, without mutated inputs or aliases."""
    recorded = torch.is_grad_enabled() and any(call_input.requires_grad for call_input in call.inputs)
    outputs = tuple(
        Output(
            torch_dtype := _torch_dtype(dtype),
            len(shape),
            call.tensors[0].device if call.tensors else torch.device("cpu"),
            differentiable=recorded and (torch_dtype.is_floating_point or torch_dtype.is_complex),
            result=index,
            alias=-1,
            changed=-1,
        )
        for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    slots = tuple(Slot("tensor", i) for i in range(len(outputs)))
    result: Any = slots[0] if len(slots) == 1 else slots
    sizes = tuple(torch.Size(shape) for shape in shapes)
    return TrialRun(result, result, outputs, sizes, frozenset(), (), recorded)


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else TORCH_DTYPES[ir.DataType(int(dtype))]


# Deducing


_PROBES: tuple[Callable[[int, int], int], ...] = (
    lambda size, k: size * (2 + k),  # keeps divisibility
    lambda size, k: size * (3 + 2 * k),
    lambda size, k: size + 1 + k,
    lambda size, k: size + 3 + 2 * k,
    lambda size, k: max(1, size - 1 - k),  # stays below an upper limit
    lambda size, _: size * 2,  # these keep equal sizes equal
    lambda size, _: size * 3,
    lambda size, _: size + 1,
)
_RUNS = 3  # at the example's sizes and at two others, because a term has two unknowns


def deduced_rule(call: CallArguments, failure: Exception | None) -> tuple[TrialRun, ShapeRule]:
    """Run the function at several sizes, and deduce a rule that is valid for all these runs.

    Args:
        call: the function and its arguments.
        failure: the error that it raised on fake tensors with symbolic sizes; None if it ran.

    Returns:
        The run at the example's sizes, and the rule.

    Raises:
        CaptureError: the function does not run, or no rule fits.
    """
    hints = _hints(call)
    runs: list[tuple[dict[Any, int], TrialRun]] = []
    for probe in (None, *_PROBES):
        binding = hints if probe is None else {s: probe(hint, k) for k, (s, hint) in enumerate(hints.items())}
        if any(binding == tried for tried, _ in runs) or len(runs) == _RUNS:
            continue
        try:
            runs.append((binding, _run_at(call, binding)))
        except CaptureError:
            raise
        except Exception as error:  # the user's forward may raise anything at sizes that it does not support
            if probe is None:
                raise _run_error(call, failure or error) from error
    if hints and len(runs) < _RUNS:
        raise _rule_error(call, f"forward runs at {len(runs)} of {len(_PROBES) + 1} tried combinations of sizes")
    run = runs[0][1]
    for _, other in runs[1:]:
        if (other.result, other.outputs, other.copied) != (run.result, run.outputs, run.copied):
            raise _rule_error(call, "forward returns different kinds of results at other sizes")
    return run, _DeducedRule(
        tuple(
            tuple(_deduce_term(call, runs, index, axis) for axis in range(output.rank))
            for index, output in enumerate(run.outputs)
        )
    )


def _hints(call: CallArguments) -> dict[Any, int]:
    """Return the size symbols of the call's inputs, and their values in the example."""
    hints: dict[Any, int] = {}
    for size in (*itertools.chain(*(t.shape for t in call.tensors)), *call.sizes):
        if isinstance(size, torch.SymInt):
            env = size.node.shape_env
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                hints[symbol] = int(env.backed_var_to_val.get(symbol, 4))
    return hints


def _run_at(call: CallArguments, binding: dict[Any, int]) -> TrialRun:
    """Run the function at these sizes on fake tensors, or if it fails on these on real tensors with random elements."""
    sizes = [_evaluate(size, binding) for size in call.sizes]
    try:
        return try_call(call, [_tensor_at(t, binding) for t in call.tensors], sizes)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001
        with without_fakes(), torch.random.fork_rng(devices=[]), _RefuseCollectives(qualified_name(call.function)):
            with disable_proxy_modes_tracing():  # keeps the random fill out of the graph
                tensors = [_tensor_at(t, binding, has_elements=True) for t in call.tensors]
            return try_call(call, tensors, sizes)


class _RefuseCollectives(TorchDispatchMode):
    """Refuse collectives, because other ranks may not be capturing and would not take part."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise CaptureError(
                f"forward of {self._name} runs a collective, and fails on fake tensors",
                where=source_location.of_caller(),
                todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
            )
        return func(*args, **(kwargs or {}))


def _evaluate(size: Any, binding: dict[Any, int]) -> int:
    return int(size.node.expr.xreplace(binding)) if isinstance(size, torch.SymInt) else int(size)


def _tensor_at(tensor: torch.Tensor, binding: dict[Any, int], has_elements: bool = False) -> torch.Tensor:
    """Make a tensor with the sizes of `tensor` under `binding`, uninitialized unless it `has_elements`."""
    shape = [_evaluate(size, binding) for size in tensor.shape]
    strides = [_evaluate(stride, binding) for stride in tensor.stride()]
    new = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if has_elements:
        new.uniform_(0.5, 1.5) if new.is_floating_point() else new.zero_()
    return new


_Runs: TypeAlias = "Sequence[tuple[dict[Any, int], TrialRun]]"


def _deduce_term(call: CallArguments, runs: _Runs, output: int, axis: int) -> _Term:
    """Deduce the term for one dimension of one output."""
    observed = [run.shapes[output][axis] for _, run in runs]
    if len(set(observed)) == 1:
        return _Term(int(observed[0]), (), 0)
    source_of: dict[tuple[int, ...], _SizeSource] = {}  # by the values of the source in the runs
    shapes = [tensor.shape for tensor in call.tensors]
    for source in _size_sources(call):
        values = [_evaluate(source.evaluate(shapes, call.sizes), binding) for binding, _ in runs]
        source_of.setdefault(tuple(values), source)
    for count in (1, 2, 3):
        terms = []
        for group in itertools.combinations_with_replacement(source_of, count):
            column_products = [math.prod(column) for column in zip(*group, strict=True)]
            fit = _fit_line(column_products, observed)
            if fit is not None and (count == 1 or fit[1] == 0):
                terms.append(_Term(fit[0], tuple(source_of[values] for values in group), fit[1]))
        if terms:  # a size itself before 2 * another - 3, which may be equal at these sizes by chance
            return min(terms, key=lambda term: (abs(term.offset), term.factor))
    raise _rule_error(call, f"dimension {axis} of output {output} is {observed} for inputs of {_shapes(call, runs)}")


def _size_sources(call: CallArguments) -> Iterator[_SizeSource]:
    for i, tensor in enumerate(call.tensors):
        yield from (_SizeSource(i, d) for d in range(tensor.dim()))
    yield from (_SizeSource(-1, i) for i in range(len(call.sizes)))


def _fit_line(xs: Sequence[int], ys: Sequence[int]) -> tuple[int, int] | None:
    """Return integers (a, b), a > 0, with y = a * x + b for all points; None if there are none."""
    other = next((i for i, x in enumerate(xs) if x != xs[0]), None)
    if other is None:
        return None
    factor, rest = divmod(ys[other] - ys[0], xs[other] - xs[0])
    offset = ys[0] - factor * xs[0]
    if rest or factor <= 0 or any(factor * x + offset != y for x, y in zip(xs, ys, strict=True)):
        return None
    return factor, offset


def _shapes(call: CallArguments, runs: _Runs) -> str:
    return "; ".join(
        ", ".join(str([_evaluate(size, binding) for size in t.shape]) for t in call.tensors) for binding, _ in runs
    )


def _run_error(call: CallArguments, error: Exception) -> CaptureError:
    lines = str(error).strip().splitlines()
    return CaptureError(
        f"forward of {qualified_name(call.function)} cannot be run while the module is captured: "
        f"{type(error).__name__}: {lines[0] if lines else ''}",
        where=source_location.of_error(error) or line_of(call.function, "forward"),
        todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
    )


def _rule_error(call: CallArguments, got: str) -> CaptureError:
    return CaptureError(
        f"cannot deduce the output sizes of {qualified_name(call.function)} from the sizes of its inputs",
        where=line_of(call.function, "forward"),
        expected="forward runs at other sizes, with output sizes like 2 * s0 + 1 or s0 * s1",
        got=got,
        todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
    )
