"""Sweep PyTorch's operator database: capture each differentiable operator and compare it with eager at two sizes.

    python -m tests.ops.op_db_sweep                       all of it (a quarter of an hour on one core)
    python -m tests.ops.op_db_sweep "fft|svd" --verbose   operators whose name matches
    python -m tests.ops.op_db_sweep --json results.json   the results for other programs

Each sample becomes a module, which is captured. Outputs and gradients are compared with eager's, on the sample and on a
second batch of other sizes with the same capture. An operator has the form of its worst sample:

    native     every node has a definition, in forward and in backward
    traced     ATen nodes, with gradients traced from PyTorch's autograd
    run time   ATen nodes that run under autograd
    failed     the module falls back, or a value is wrong
"""

from __future__ import annotations

import argparse
import collections
import copy
import enum
import json
import logging
import multiprocessing
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.ops.captures import FunctionModule

# The database seeds random operators inside their call, which a graph does not; here each run is seeded before it.
database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)

SAMPLES = 4  # per operator, spread over all its samples
SECONDS = 120  # CPU time per operator: independent of other programs on the machine
NO_OTHER_SIZES = ("_segment_reduce",)  # eager PyTorch crashes if lengths and data do not match
_FORK = multiprocessing.get_context("fork")  # a child has everything imported


class Form(enum.IntEnum):
    """How an operator runs, best first."""

    NATIVE = 0
    TRACED = 1
    RUN_TIME = 2
    FAILED = 3


@dataclass
class Outcome:
    """The result for one operator.

    Attributes:
        form: of its worst sample.
        samples: the number of samples compared.
        resized: the number of them compared at a second size with the same capture.
        fixed: why sizes of the others did not change: "rejected" by the operator, or "specialized" by the capture.
        operators: the ATen operators in the graphs.
        reasons: why gradients are taken at run time.
        error: the first failure.
    """

    name: str
    form: Form = Form.NATIVE
    samples: int = 0
    resized: int = 0
    fixed: list[str] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


class Rejected(Exception):  # noqa: N818  # not an error of onnxtrain
    """Eager PyTorch rejects the sample."""


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def differentiable() -> list[OpInfo]:
    """Return the operators of the database that are differentiable in float32."""
    return [op for op in database.op_db if op.supports_autograd and torch.float32 in op.dtypes]


def samples_of(op: OpInfo, count: int) -> list[SampleInput]:
    """Return up to `count` samples, spread over all those of the operator."""
    torch.manual_seed(7)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    if len(samples) <= count:
        return samples
    return [samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count)]


def as_call(op: OpInfo, sample: SampleInput) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return the sample as a function of its tensors, and the tensors."""
    leaves, spec = pytree.tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    function, postprocess = op.op, sample.output_process_fn_grad

    def call(*tensors: torch.Tensor) -> Any:
        arguments = list(constants)
        for position, tensor in zip(positions, tensors, strict=True):
            arguments[position] = tensor
        first, args, kwargs = pytree.tree_unflatten(arguments, spec)
        result = function(first, *args, **kwargs)
        return result if postprocess is None else postprocess(result)

    return call, [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in positions]


# Comparison


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def run(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Return the outputs, and the gradients for fixed random cotangents."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    torch.manual_seed(11)
    outputs = [o for o in pytree.tree_leaves(module(*leaves)) if isinstance(o, torch.Tensor)]
    generator = torch.Generator().manual_seed(5)
    pairs = []
    for output in outputs:
        width = torch.complex128 if output.is_complex() else torch.float64
        cotangent = torch.randn(output.shape, generator=generator, dtype=width)
        if output.requires_grad:
            pairs.append((output, cotangent.to(output.dtype)))
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Any] = [None] * len(inputs)
    if pairs and inputs:
        gradients = torch.autograd.grad([o for o, _ in pairs], inputs, [c for _, c in pairs], allow_unused=True)
    return [o.detach() for o in outputs], list(gradients)


def is_random(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the sample uses the random generator."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module(*tensors)
    return not torch.equal(before, torch.get_rng_state())


def compare(ours: torch.nn.Module, eager: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Compare outputs and gradients with eager's.

    Raises:
        Rejected: eager PyTorch cannot run the sample.
        AssertionError: they differ.
    """
    try:
        expected = run(eager, tensors)
        exact = expected if is_random(eager, tensors) else run_in_float64(eager, tensors, expected)
    except Exception as error:  # whatever the operator raises
        raise Rejected(str(error)) from error
    got = run(ours, tensors)
    largest = max((_size(x) for x in exact[1] if x is not None), default=0.0)
    for kind, ours_values, eager_values, exact_values in zip(("output", "gradient"), got, expected, exact, strict=True):
        assert len(ours_values) == len(eager_values), f"{len(ours_values)} {kind}s, eager has {len(eager_values)}"
        for index, (g, e, x) in enumerate(zip(ours_values, eager_values, exact_values, strict=True)):
            name = f"{kind} {index}"
            if e is None or g is None:  # no gradient is equal to a gradient of zeros here
                other = g if e is None else e
                assert other is None or not other.to_dense().any(), f"{name}: one has none, the other is not zero"
                continue
            assert g.layout == e.layout, f"{name}: {g.layout}, eager has {e.layout}"
            assert g.dtype == e.dtype, f"{name}: {g.dtype}, eager has {e.dtype}"
            assert_no_worse_than_eager(name, _real(g), _real(e), _real(x), largest if kind == "gradient" else 0.0)


def _size(tensor: torch.Tensor) -> float:
    real = _real(tensor).double()
    finite = real[torch.isfinite(real)]
    return finite.abs().max().item() if finite.numel() else 0.0


def _real(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def run_in_float64(
    module: torch.nn.Module, tensors: Sequence[torch.Tensor], expected: Any
) -> tuple[list[Any], list[Any]]:
    """Run in float64; return `expected` if that computes something else, because the operator fixes a dtype."""
    wide = [in_double(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
    try:
        results = run(module, wide)
    except Exception:  # noqa: BLE001  # an operator without a double kernel
        return expected  # type: ignore[no-any-return]
    pairs = zip((*expected[0], *expected[1]), (*results[0], *results[1]), strict=True)
    if any((e is None) != (r is None) or (e is not None and e.shape != r.shape) for e, r in pairs):
        return expected  # type: ignore[no-any-return]
    return results


# A second size


def resized(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors with one of their sizes changed, wherever it occurs; elements repeat, slightly scaled down.

    Scaling avoids ties and singular matrices; scaling down keeps the elements in the operator's domain.
    """
    distinct_sizes = dict.fromkeys(s for t in tensors for s in t.shape if s > 1)
    for size in distinct_sizes:
        for change in (1, -1):
            yield [_resized(t, {d: s + change for d, s in enumerate(t.shape) if s == size}) for t in tensors]
    for number, tensor in enumerate(tensors):  # in one tensor only
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                yield [_resized(t, {axis: size + 1}) if i == number else t for i, t in enumerate(tensors)]


def other_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_resized(t, {}) for t in tensors]


def _resized(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    result = tensor.detach()
    for axis, size in sizes.items():
        result = result.index_select(axis, torch.arange(size) % tensor.size(axis))
    if result.is_floating_point() or result.is_complex():
        generator = torch.Generator().manual_seed(size_hash(result))
        result = result * (1 - 0.1 * torch.rand(result.shape, generator=generator))
    order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))  # a capture is for one memory format
    inverse = [order.index(d) for d in range(tensor.ndim)]
    return result.permute(order).contiguous().permute(inverse).requires_grad_(tensor.requires_grad)


def size_hash(tensor: torch.Tensor) -> int:
    return sum((i + 1) * s for i, s in enumerate(tensor.shape))


# One operator


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def graph_nodes(module: ORTModule) -> tuple[list[Any], list[Any]]:
    """Return the nodes of the captured graph and of its backward programs."""
    compiled = engine_of(module).newest()
    backwards = compiled.unit._backwards.values()
    return list(compiled.captured.model.graph), [n for b in backwards for n in b.program.part.nodes]


def form_of(module: ORTModule) -> tuple[Form, list[str]]:
    """Return how a captured module runs, and its ATen operators."""
    forward, backward = graph_nodes(module)
    calls = [n.attributes["operator"].as_string() for n in (*forward, *backward) if n.op_type == "ATen"]
    if any(n.op_type == "ATenGrad" for n in backward):
        return Form.RUN_TIME, calls
    return (Form.TRACED if calls else Form.NATIVE), calls


def check_sample(call: Callable[..., Any], tensors: Sequence[torch.Tensor], outcome: Outcome) -> None:
    """Capture one sample, compare it, and update `outcome`."""
    eager = FunctionModule(call)  # its tensors are inputs, everything else is part of the function
    ours = ORTModule(copy.copy(eager), rng="torch", fallback_policy="FALLBACK_DISABLE")
    compare(ours, eager, tensors)
    outcome.samples += 1
    engine = engine_of(ours)
    if engine.captures == 0:
        return
    form, calls = form_of(ours)
    outcome.form = max(outcome.form, form)
    outcome.operators = sorted({*outcome.operators, *calls})
    outcome.fixed += second_size(ours, eager, tensors, not outcome.name.startswith(NO_OTHER_SIZES))
    outcome.resized = outcome.samples - len(outcome.fixed)
    assert engine.captures == 1, f"{engine.captures} captures"


def second_size(
    ours: ORTModule, eager: torch.nn.Module, tensors: Sequence[torch.Tensor], change: bool = True
) -> list[str]:
    """Compare at another size with the same capture; return the reason if there is none."""
    guards = engine_of(ours).newest().captured.guards
    reason = "rejected"
    for other in resized(tensors) if change else ():
        if not guards(other):
            reason = "specialized" if accepted(eager, other) else reason
            continue
        try:
            compare(ours, eager, other)
        except Rejected:
            continue
        return []
    try:
        compare(ours, eager, other_values(tensors))
    except Rejected:
        reason = "one batch only"
    return [reason]


def accepted(eager: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    try:
        run(eager, tensors)
    except Exception:  # noqa: BLE001  # whatever the operator raises
        return False
    return True


class _Reasons(logging.Handler):
    """Collect the logged reasons why gradients cannot be traced."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "traced" in text and text not in self.messages:
            self.messages.append(text)


@contextmanager
def recorded_reasons() -> Iterator[list[str]]:
    log, handler = logging.getLogger("onnxtrain"), _Reasons()
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield handler.messages
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def check_operator(op: OpInfo, samples: int = SAMPLES, seconds: int = SECONDS) -> Outcome:
    """Check an operator on some of its samples."""
    outcome = Outcome(full_name(op))
    start = time.perf_counter()
    with warnings.catch_warnings(), recorded_reasons() as outcome.reasons:
        warnings.simplefilter("ignore")
        try:
            with time_limit(seconds):
                for sample in samples_of(op, samples):
                    try:
                        check_sample(*as_call(op, sample), outcome)
                    except Rejected:
                        continue
        except Exception as error:  # noqa: BLE001  # a failure is a result
            outcome.form = Form.FAILED
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = time.perf_counter() - start
    return outcome


def check_isolated(op: OpInfo, samples: int) -> Outcome:
    """Run `check_operator` in a child process: some operators crash on sizes that they do not check."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=lambda: sender.send(check_operator(op, samples)))
    child.start()
    sender.close()
    try:
        return receiver.recv()  # type: ignore[no-any-return]
    except EOFError:
        child.join()
        return Outcome(full_name(op), Form.FAILED, error=f"the process ended with code {child.exitcode}")
    finally:
        child.join()


# The program


def format_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return the table of counts, and the failures by cause."""
    count = collections.Counter(o.form for o in outcomes)
    total = len(outcomes)
    lines = ["", f"{'':<12}{'operators':>10}"]
    lines += [f"{f.name.lower():<12}{count[f]:>10}{count[f] / max(total, 1):>9.1%}" for f in Form]
    samples, resized_ = sum(o.samples for o in outcomes), sum(o.resized for o in outcomes)
    fixed = collections.Counter(reason for o in outcomes for reason in o.fixed)
    lines.append(f"{samples} samples, {resized_} at two sizes with one capture")
    lines += [f"    {n} with other values only: sizes {reason}" for reason, n in fixed.most_common()]
    causes = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.form == Form.FAILED:
            causes[cause(outcome.error)].append(outcome.name)
    for text, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(names):>4}  {text}\n        {', '.join(names)}")
    for form in (Form.RUN_TIME, Form.TRACED):
        by_operators = collections.defaultdict(list)
        for outcome in outcomes:
            if outcome.form == form:
                by_operators[", ".join(sorted(outcome.operators))].append(outcome.name)
        lines.append(f"{form.name.lower()}:")
        lines += [f"        {', '.join(names)}: {operators}" for operators, names in by_operators.items()]
    reasons = collections.Counter(cause(r) for o in outcomes if o.form == Form.RUN_TIME for r in o.reasons)
    lines.append("why at run time:")
    lines += [f"{n:>4}  {text}" for text, n in reasons.most_common()]
    return "\n".join(lines)


def cause(error: str) -> str:
    """Return the first line of an error without its numbers."""
    first = error.strip().splitlines()[0] if error.strip() else "?"
    return re.sub(r"\d+\.?\d*(e[-+]\d+)?", "#", first)[:160]


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression for operator names")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples per operator")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--verbose", action="store_true", help="print complete errors")
    options = parser.parse_args(arguments)
    selected = [op for op in differentiable() if re.search(options.pattern, full_name(op))]
    check_operator(next(op for op in differentiable() if op.name == "trapz"), 1)  # warm up before forking
    outcomes = []
    for number, op in enumerate(selected, 1):
        outcome = check_isolated(op, options.samples)
        outcomes.append(outcome)
        error = outcome.error if options.verbose else cause(outcome.error) if outcome.error else ""
        notes = " ".join([*outcome.operators, error])
        _print(
            f"{number:>4}/{len(selected)} {outcome.form.name.lower():<9} {outcome.name:<45} {outcome.seconds:5.1f} s "
            f"{outcome.resized}/{outcome.samples} {notes}"
        )
        if options.json:
            options.json.write_text(json.dumps([vars(o) for o in outcomes], indent=1))
    _print(format_outcomes(outcomes))
    return int(any(o.form == Form.FAILED for o in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
