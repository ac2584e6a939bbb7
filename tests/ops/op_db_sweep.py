"""Sweeps PyTorch's own operator database: each differentiable operator captured, and compared with eager at two sizes.

    python -m tests.ops.op_db_sweep                       all of it (a quarter of an hour on one core)
    python -m tests.ops.op_db_sweep "fft|svd" --verbose   operators whose name matches
    python -m tests.ops.op_db_sweep --json found.json     the results for other programs

Each sample becomes a module, which is captured; then outputs and gradients are compared with eager's, on the sample and
on a second batch of other sizes for the same capture. An operator stands where its worst sample stands:

    native     every node has a definition of ours, in forward and in backward
    traced     ATen nodes, with the gradient that was traced from PyTorch's autograd
    run time   ATen nodes that run under autograd
    failed     the module does not become a graph, or a number is wrong
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

# The database seeds random operators inside their call, which no graph does; here each run is seeded before.
database.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)

SAMPLES = 4  # per operator, spread over those that it has
SECONDS = 120  # of CPU time per operator: other programs on the machine do not count
NO_OTHER_SIZES = ("_segment_reduce",)  # eager PyTorch crashes where lengths and data do not fit
_FORK = multiprocessing.get_context("fork")  # a child starts with everything imported


class Form(enum.IntEnum):
    """How an operator runs, best first."""

    NATIVE = 0
    TRACED = 1
    RUN_TIME = 2
    FAILED = 3


@dataclass
class Outcome:
    """What became of one operator.

    Attributes:
        form: how its worst sample runs.
        samples: how many samples were compared.
        resized: how many of them at a second size on the same capture.
        fixed: why sizes of the others did not change: "refused" by the operator, or "specialised" by the capture.
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


class Refused(Exception):  # noqa: N818  # no error of ours
    """Eager PyTorch itself refuses the sample."""


class OfTensors(torch.nn.Module):
    """A sample as a module: its tensors come in, all else is part of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def differentiable() -> list[OpInfo]:
    """The operators of the database with a gradient in float32."""
    return [op for op in database.op_db if op.supports_autograd and torch.float32 in op.dtypes]


def samples_of(op: OpInfo, count: int) -> list[SampleInput]:
    """Up to `count` samples, spread over those that the database has."""
    torch.manual_seed(7)
    found = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))
    if len(found) <= count:
        return found
    return [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)]


def as_call(op: OpInfo, sample: SampleInput) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The sample as a function of its tensors, and the tensors."""
    leaves, spec = pytree.tree_flatten((sample.input, list(sample.args), dict(sample.kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    function, finish = op.op, sample.output_process_fn_grad

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(constants)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, spec)
        result = function(first, *args, **kwargs)
        return result if finish is None else finish(result)

    return call, [leaves[i].detach().requires_grad_(leaves[i].requires_grad) for i in places]


# Comparison


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def run(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """Outputs, and gradients under fixed random cotangents."""
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
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found: Sequence[Any] = [None] * len(wanted)
    if pairs and wanted:
        found = torch.autograd.grad([o for o, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True)
    return [o.detach() for o in outputs], list(found)


def is_random(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the sample draws random numbers."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module(*tensors)
    return not torch.equal(before, torch.get_rng_state())


def compare(ours: torch.nn.Module, eager: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Fails where ours differs from eager's outputs or gradients.

    Raises:
        Refused: eager PyTorch cannot run the sample.
        AssertionError: a difference.
    """
    try:
        theirs = run(eager, tensors)
        exact = theirs if is_random(eager, tensors) else run_exactly(eager, tensors, theirs)
    except Exception as error:  # whatever the operator raises
        raise Refused(str(error)) from error
    got = run(ours, tensors)
    largest = max((_size(x) for x in exact[1] if x is not None), default=0.0)
    for kind, mine, right, best in zip(("output", "gradient"), got, theirs, exact, strict=True):
        assert len(mine) == len(right), f"{len(mine)} {kind}s, eager has {len(right)}"
        for index, (g, e, x) in enumerate(zip(mine, right, best, strict=True)):
            name = f"{kind} {index}"
            if e is None or g is None:  # no gradient and a gradient of zeros are one here
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


def run_exactly(module: torch.nn.Module, tensors: Sequence[torch.Tensor], theirs: Any) -> tuple[list[Any], list[Any]]:
    """In float64; where that computes something else (the operator fixes a dtype), eager's own result."""
    wide = [in_double(t.detach()).requires_grad_(t.requires_grad) for t in tensors]
    try:
        found = run(module, wide)
    except Exception:  # noqa: BLE001  # an operator without a double kernel
        return theirs  # type: ignore[no-any-return]
    pairs = zip((*theirs[0], *theirs[1]), (*found[0], *found[1]), strict=True)
    if any((t is None) != (f is None) or (t is not None and t.shape != f.shape) for t, f in pairs):
        return theirs  # type: ignore[no-any-return]
    return found


# A second size


def resized(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same tensors with one of their sizes changed, wherever it occurs; elements repeat, shrunk a little.

    Shrunk, so that no ties or singular matrices arise; towards zero, so that they stay in the operator's domain.
    """
    wanted = dict.fromkeys(s for t in tensors for s in t.shape if s > 1)
    for size in wanted:
        for change in (1, -1):
            yield [_resized(t, {d: s + change for d, s in enumerate(t.shape) if s == size}) for t in tensors]
    for number, tensor in enumerate(tensors):  # only one of them
        for axis, size in enumerate(tensor.shape):
            if size > 1:
                yield [_resized(t, {axis: size + 1}) if i == number else t for i, t in enumerate(tensors)]


def other_values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [_resized(t, {}) for t in tensors]


def _resized(tensor: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    found = tensor.detach()
    for axis, size in sizes.items():
        found = found.index_select(axis, torch.arange(size) % tensor.size(axis))
    if found.is_floating_point() or found.is_complex():
        found = found * (1 - 0.1 * torch.rand(found.shape, generator=torch.Generator().manual_seed(size_hash(found))))
    order = sorted(range(tensor.ndim), key=lambda d: -tensor.stride(d))  # the layout stays: a capture is for one
    back = [order.index(d) for d in range(tensor.ndim)]
    return found.permute(order).contiguous().permute(back).requires_grad_(tensor.requires_grad)


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
    """The nodes of the captured graph, and of the backward programs made from it."""
    compiled = engine_of(module).newest()
    backwards = compiled.unit._backwards.values()
    return list(compiled.captured.model.graph), [n for b in backwards for n in b.program.part.nodes]


def form_of(module: ORTModule) -> tuple[Form, list[str]]:
    """How a captured module runs, and its ATen operators."""
    forward, backward = graph_nodes(module)
    calls = [n.attributes["operator"].as_string() for n in (*forward, *backward) if n.op_type == "ATen"]
    if any(n.op_type == "ATenGrad" for n in backward):
        return Form.RUN_TIME, calls
    return (Form.TRACED if calls else Form.NATIVE), calls


def check_sample(call: Callable[..., Any], tensors: Sequence[torch.Tensor], outcome: Outcome) -> None:
    """Captures one sample and compares it; notes what is found in `outcome`."""
    eager = OfTensors(call)
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
    """Compares at another size on the same capture; returns why not, where the sizes stayed."""
    guards = engine_of(ours).newest().captured.guards
    reason = "refused"
    for other in resized(tensors) if change else ():
        if not guards(other):
            reason = "specialised" if accepted(eager, other) else reason
            continue
        try:
            compare(ours, eager, other)
        except Refused:
            continue
        return []
    try:
        compare(ours, eager, other_values(tensors))
    except Refused:
        reason = "one batch only"
    return [reason]


def accepted(eager: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> bool:
    try:
        run(eager, tensors)
    except Exception:  # noqa: BLE001  # whatever the operator raises
        return False
    return True


class _Reasons(logging.Handler):
    """Collects what onnxtrain says about gradients that it cannot trace."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "traced" in text and text not in self.found:
            self.found.append(text)


@contextmanager
def reasons_noted() -> Iterator[list[str]]:
    log, handler = logging.getLogger("onnxtrain"), _Reasons()
    level = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield handler.found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def check_operator(op: OpInfo, samples: int = SAMPLES, seconds: int = SECONDS) -> Outcome:
    """Checks an operator on some of its samples."""
    outcome = Outcome(full_name(op))
    start = time.perf_counter()
    with warnings.catch_warnings(), reasons_noted() as outcome.reasons:
        warnings.simplefilter("ignore")
        try:
            with time_limit(seconds):
                for sample in samples_of(op, samples):
                    try:
                        check_sample(*as_call(op, sample), outcome)
                    except Refused:
                        continue
        except Exception as error:  # noqa: BLE001  # every failure is a result here
            outcome.form = Form.FAILED
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.seconds = time.perf_counter() - start
    return outcome


def check_isolated(op: OpInfo, samples: int) -> Outcome:
    """`check_operator` in a child process: some operators crash on sizes that they do not check."""
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


def show(outcomes: Sequence[Outcome]) -> str:
    """The table of the counts, and the failures by cause."""
    count = collections.Counter(o.form for o in outcomes)
    total = len(outcomes)
    lines = ["", f"{'':<12}{'operators':>10}"]
    lines += [f"{f.name.lower():<12}{count[f]:>10}{count[f] / max(total, 1):>9.1%}" for f in Form]
    samples, resized_ = sum(o.samples for o in outcomes), sum(o.resized for o in outcomes)
    fixed = collections.Counter(reason for o in outcomes for reason in o.fixed)
    lines.append(f"{samples} samples, {resized_} at two sizes on one capture")
    lines += [f"    {n} with other values only: sizes {reason}" for reason, n in fixed.most_common()]
    causes = collections.defaultdict(list)
    for outcome in outcomes:
        if outcome.form == Form.FAILED:
            causes[cause(outcome.error)].append(outcome.name)
    for text, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        lines.append(f"{len(names):>4}  {text}\n        {', '.join(names)}")
    for form in (Form.RUN_TIME, Form.TRACED):
        kinds = collections.defaultdict(list)
        for outcome in outcomes:
            if outcome.form == form:
                kinds[", ".join(sorted(outcome.operators))].append(outcome.name)
        lines.append(f"{form.name.lower()}:")
        lines += [f"        {', '.join(names)}: {operators}" for operators, names in kinds.items()]
    reasons = collections.Counter(cause(r) for o in outcomes if o.form == Form.RUN_TIME for r in o.reasons)
    lines.append("why at run time:")
    lines += [f"{n:>4}  {text}" for text, n in reasons.most_common()]
    return "\n".join(lines)


def cause(error: str) -> str:
    """An error without what differs from operator to operator."""
    first = error.strip().splitlines()[0] if error.strip() else "?"
    return re.sub(r"\d+\.?\d*(e[-+]\d+)?", "#", first)[:160]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression for names of operators")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples per operator")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--verbose", action="store_true", help="whole errors")
    options = parser.parse_args(arguments)
    chosen = [op for op in differentiable() if re.search(options.pattern, full_name(op))]
    check_operator(next(op for op in differentiable() if op.name == "trapz"), 1)  # children start with it all warm
    outcomes = []
    for number, op in enumerate(chosen, 1):
        outcome = check_isolated(op, options.samples)
        outcomes.append(outcome)
        what = outcome.error if options.verbose else cause(outcome.error) if outcome.error else ""
        notes = " ".join([*outcome.operators, what])
        _say(
            f"{number:>4}/{len(chosen)} {outcome.form.name.lower():<9} {outcome.name:<45} {outcome.seconds:5.1f} s "
            f"{outcome.resized}/{outcome.samples} {notes}"
        )
        if options.json:
            options.json.write_text(json.dumps([vars(o) for o in outcomes], indent=1))
    _say(show(outcomes))
    return int(any(o.form == Form.FAILED for o in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
