"""How the sizes of a function's outputs follow from those of its inputs.

Mostly PyTorch finds that by itself, when the function runs on fake tensors whose sizes are symbols. Where it cannot
(forward takes a size as an `int`, or needs tensors with elements), the function is run at several sizes and a rule is
deduced: `2 * s0`, `s0 * s1 + 1`. What runs later is checked against a rule, so that none is ever wrong in silence. The
user's `infer_shape`, where there is one, goes before all that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir
import sympy
import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxtrain.capture import source_location
from onnxtrain.capture.python_functions.trial_run import CallArguments, Run, run_aside
from onnxtrain.errors import CaptureError
from onnxtrain.ops.dtypes import ONNX_DTYPES, TORCH_DTYPES
from onnxtrain.ops.python_function.call import Output, ShapeRule, line_of, qualified_name
from onnxtrain.ops.python_function.template import Sizes, Slot
from onnxtrain.torch_compat.fake_tensors import without_fakes
from onnxtrain.torch_compat.modes import TorchDispatchMode

# Whether a run on symbolic sizes says what happens at other sizes

_EVALUATE = ShapeEnv.evaluate_expr


class _Noted:
    """`fixed`: whether a size was taken as a number."""

    fixed = False


@contextmanager
def sizes_fixed() -> Iterator[_Noted]:
    """Notes whether sizes are taken as numbers inside. No guard comes of it: the call decides anew at each run."""
    noted = _Noted()

    def evaluate(env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
        with env.suppress_guards():
            value = _EVALUATE(env, expr, *args, **kwargs)
        if getattr(expr, "free_symbols", None) and _fixes(expr, value):
            noted.fixed = True
        return value

    before = ShapeEnv.evaluate_expr
    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign, assignment]  # also without notes of decisions
    try:
        yield noted
    finally:
        ShapeEnv.evaluate_expr = before  # type: ignore[method-assign]


def _fixes(expr: Any, value: Any) -> bool:
    if not isinstance(expr, (sympy.logic.boolalg.Boolean, sympy.core.relational.Relational)):
        return True
    equal = isinstance(expr, sympy.Eq) == bool(value) and isinstance(expr, (sympy.Eq, sympy.Ne))
    return equal and any(side.is_number for side in expr.args)


# Rules


@dataclass(frozen=True, slots=True)
class _Source:
    """A size of an input, or a size argument (tensor -1)."""

    tensor: int
    place: int

    def of(self, shapes: Sequence[Sizes], sizes: Sizes) -> Any:
        return sizes[self.place] if self.tensor < 0 else shapes[self.tensor][self.place]


@dataclass(frozen=True, slots=True)
class _Term:
    """factor * (the sources multiplied) + offset."""

    factor: int
    sources: tuple[_Source, ...]
    offset: int

    def of(self, shapes: Sequence[Sizes], sizes: Sizes) -> Any:
        value: Any = self.factor
        for source in self.sources:
            value = value * source.of(shapes, sizes)
        return value + self.offset if self.offset else value


@dataclass(frozen=True, slots=True)
class _Deduced:
    """A rule found by running the function."""

    outputs: tuple[tuple[_Term, ...], ...]

    def __call__(self, shapes: Sequence[Sizes], sizes: Sizes) -> list[list[Any]]:
        return [[term.of(shapes, sizes) for term in terms] for terms in self.outputs]


@dataclass(frozen=True)
class _Declared:
    """The user's `infer_shape`."""

    infer: Callable[..., Any]
    name: str
    node: bytes
    dtypes: tuple[int, ...]

    def __call__(self, shapes: Sequence[Sizes], sizes: Sizes) -> list[list[Any]]:
        return [list(shape) for shape in self.ask(shapes)[0]]

    def ask(self, shapes: Sequence[Sizes]) -> tuple[list[Any], list[Any]]:
        """Sizes and element types of the outputs."""
        node = onnx.NodeProto.FromString(self.node)
        try:
            found, dtypes = self.infer(node, [list(shape) for shape in shapes], list(self.dtypes))
        except (TypeError, ValueError) as error:
            raise self._wrong("two lists, of sizes and of element types", repr(error)) from error
        if len(found) != len(dtypes) or any(isinstance(s, str) or s is None for shape in found for s in shape):
            raise self._wrong("for each output its sizes and its element type", (found, dtypes))
        return list(found), list(dtypes)

    def _wrong(self, expected: str, got: object) -> CaptureError:
        return CaptureError(
            f"infer_shape of {self.name} did not say what its outputs are",
            where=line_of(self, "infer"),
            expected=expected,
            got=got,
            todo="sizes come as numbers that can be calculated with; return such",
        )


def node_proto(name: str, inputs: int) -> onnx.NodeProto:
    """The node as `infer_shape` and `alias_input` get it: before its outputs are known."""
    names = [f"input_{i}" for i in range(inputs)]
    return onnx.helper.make_node("PythonOp", names, ["context"], domain="com.microsoft", func_name=name)


def declared_rule(call: CallArguments, run: Run | None, infer: Callable[..., Any]) -> tuple[Run, ShapeRule]:
    """The rule that `infer_shape` is, and what the call does as far as it is known."""
    name = qualified_name(call.function)
    node = node_proto(name, len(call.tensors))
    types = tuple(int(ONNX_DTYPES[known.dtype]) for known in call.inputs)
    rule = _Declared(infer, name, node.SerializeToString(), types)
    shapes, dtypes = rule.ask([tensor.shape for tensor in call.tensors])
    if run is not None:
        if len(shapes) != len(run.outputs):
            raise CaptureError(
                f"infer_shape of {name} gave the wrong number of outputs",
                where=line_of(call.function, "infer_shape"),
                expected=f"{len(run.outputs)}, as forward returns",
                got=len(shapes),
                todo="return two lists: for each output its sizes, for each output its element type",
            )
        return run, rule
    return _assumed(call, shapes, dtypes), rule


def _assumed(call: CallArguments, shapes: Sequence[Sizes], dtypes: Sequence[Any]) -> Run:
    """What a call does of which only the types of its outputs are known: nothing else."""
    recorded = torch.is_grad_enabled() and any(known.requires_grad for known in call.inputs)
    outputs = tuple(
        Output(
            dtype := _torch_dtype(given),
            len(shape),
            call.tensors[0].device if call.tensors else torch.device("cpu"),
            differentiable=recorded and (dtype.is_floating_point or dtype.is_complex),
            result=number,
            alias=-1,
            changed=-1,
        )
        for number, (shape, given) in enumerate(zip(shapes, dtypes, strict=True))
    )
    slots = tuple(Slot("tensor", i) for i in range(len(outputs)))
    result: Any = slots[0] if len(slots) == 1 else slots
    sizes = tuple(torch.Size(shape) for shape in shapes)
    return Run(result, result, outputs, sizes, frozenset(), (), recorded)


def _torch_dtype(given: Any) -> torch.dtype:
    return given if isinstance(given, torch.dtype) else TORCH_DTYPES[ir.DataType(int(given))]


# Deducing


_PROBES: tuple[Callable[[int, int], int], ...] = (
    lambda size, k: size * (2 + k),  # keeps what must be divisible
    lambda size, k: size * (3 + 2 * k),
    lambda size, k: size + 1 + k,
    lambda size, k: size + 3 + 2 * k,
    lambda size, k: max(1, size - 1 - k),  # keeps below a limit
)
_RUNS = 3  # the real sizes and two others: a rule has two unknowns


def deduced_rule(call: CallArguments, failure: Exception | None) -> tuple[Run, ShapeRule]:
    """What the call does at the sizes of now, and a rule that holds there and at two other sizes.

    Args:
        call: the function and its arguments.
        failure: what it raised on fake tensors with symbolic sizes; None if it ran.

    Raises:
        CaptureError: the function does not run, or no rule is found.
    """
    hints = _hints(call)
    tries: list[tuple[dict[Any, int], Run]] = []
    for make in (None, *_PROBES):
        binding = hints if make is None else {s: make(h, k) for k, (s, h) in enumerate(hints.items())}
        if any(binding == known for known, _ in tries) or len(tries) == _RUNS:
            continue
        try:
            tries.append((binding, _run_at(call, binding)))
        except CaptureError:
            raise
        except Exception as error:  # the user's forward raises anything, also at sizes it does not take
            if make is None:
                raise _does_not_run(call, failure or error) from error
    if hints and len(tries) < _RUNS:
        raise _no_rule(call, f"forward runs at {len(tries)} of {len(_PROBES) + 1} tried sizes")
    run = tries[0][1]
    for _, other in tries[1:]:
        if (other.result, other.outputs, other.copied) != (run.result, run.outputs, run.copied):
            raise _no_rule(call, "its results are of another kind at other sizes")
    return run, _Deduced(
        tuple(
            tuple(_term(call, tries, output, axis) for axis in range(known.rank))
            for output, known in enumerate(run.outputs)
        )
    )


def _hints(call: CallArguments) -> dict[Any, int]:
    """The size symbols of the call's inputs, and what they are now."""
    found: dict[Any, int] = {}
    for size in (*itertools.chain(*(t.shape for t in call.tensors)), *call.sizes):
        if isinstance(size, torch.SymInt):
            env = size.node.shape_env
            for symbol in sorted(size.node.expr.free_symbols, key=str):
                found[symbol] = int(env.backed_var_to_val.get(symbol, 4))
    return found


def _run_at(call: CallArguments, binding: dict[Any, int]) -> Run:
    """Runs the function at these sizes on fake tensors, or where it needs elements on random ones."""
    sizes = [_number(size, binding) for size in call.sizes]
    try:
        return run_aside(call, [_tensor(t, binding) for t in call.tensors], sizes)
    except CaptureError:
        raise
    except Exception:  # noqa: BLE001
        with without_fakes(), torch.random.fork_rng(devices=[]), _NoCollectives(qualified_name(call.function)):
            with disable_proxy_modes_tracing():  # else the graph would draw these elements as well
                tensors = [_tensor(t, binding, elements=True) for t in call.tensors]
            return run_aside(call, tensors, sizes)


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives: other ranks may not be capturing, and would not take part."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise CaptureError(
                f"forward of {self._name} needs tensors with elements, and runs a collective",
                where=source_location.of_caller(),
                todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
            )
        return func(*args, **(kwargs or {}))


def _number(size: Any, binding: dict[Any, int]) -> int:
    return int(size.node.expr.xreplace(binding)) if isinstance(size, torch.SymInt) else int(size)


def _tensor(tensor: torch.Tensor, binding: dict[Any, int], elements: bool = False) -> torch.Tensor:
    shape = [_number(size, binding) for size in tensor.shape]
    strides = [_number(stride, binding) for stride in tensor.stride()]
    made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    if elements:
        made.uniform_(0.5, 1.5) if made.is_floating_point() else made.zero_()
    return made


def _term(call: CallArguments, tries: Sequence[tuple[dict[Any, int], Run]], output: int, axis: int) -> _Term:
    """The rule for one size of one output."""
    wanted = [run.shapes[output][axis] for _, run in tries]
    if len(set(wanted)) == 1:
        return _Term(int(wanted[0]), (), 0)
    known: dict[tuple[int, ...], _Source] = {}
    for source in _sources(call):
        values = [_number(source.of([t.shape for t in call.tensors], call.sizes), binding) for binding, _ in tries]
        known.setdefault(tuple(values), source)
    for count in (1, 2, 3):
        for group in itertools.combinations_with_replacement(known, count):
            products = [_product(column) for column in zip(*group, strict=True)]
            fit = _line(products, wanted)
            if fit is not None and (count == 1 or fit[1] == 0):
                return _Term(fit[0], tuple(known[values] for values in group), fit[1])
    raise _no_rule(call, f"size {axis} of output {output} is {wanted} for inputs of {_shapes(call, tries)}")


def _sources(call: CallArguments) -> Iterator[_Source]:
    for i, tensor in enumerate(call.tensors):
        yield from (_Source(i, d) for d in range(tensor.dim()))
    yield from (_Source(-1, i) for i in range(len(call.sizes)))


def _product(numbers: Sequence[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _line(xs: Sequence[int], ys: Sequence[int]) -> tuple[int, int] | None:
    """Integers (a, b) with y = a * x + b, if there are any."""
    other = next((i for i, x in enumerate(xs) if x != xs[0]), None)
    if other is None:
        return None
    factor, rest = divmod(ys[other] - ys[0], xs[other] - xs[0])
    offset = ys[0] - factor * xs[0]
    if rest or factor <= 0 or any(factor * x + offset != y for x, y in zip(xs, ys, strict=True)):
        return None
    return factor, offset


def _shapes(call: CallArguments, tries: Sequence[tuple[dict[Any, int], Run]]) -> str:
    return "; ".join(
        ", ".join(str([_number(size, binding) for size in t.shape]) for t in call.tensors) for binding, _ in tries
    )


def _does_not_run(call: CallArguments, error: Exception) -> CaptureError:
    lines = str(error).strip().splitlines()
    return CaptureError(
        f"forward of {qualified_name(call.function)} cannot be run while the module is captured: "
        f"{type(error).__name__}: {lines[0] if lines else ''}",
        where=source_location.of_error(error) or line_of(call.function, "forward"),
        todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
    )


def _no_rule(call: CallArguments, got: str) -> CaptureError:
    return CaptureError(
        f"how the output sizes of {qualified_name(call.function)} follow from its inputs cannot be told",
        where=line_of(call.function, "forward"),
        got=got,
        todo="define infer_shape(node, tensor_input_shapes, tensor_input_dtypes) on the function",
    )
