"""`onnxtrain explain MODEL`: what each pass did with a model, what it refused and why, and the work that is left.

So with fused regions: which there are, and which operators stay out of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape

from onnxtrain.cli.model import model_arguments, model_of
from onnxtrain.engine import Engine
from onnxtrain.module import ORTModule
from onnxtrain.observe.logs import only_errors
from onnxtrain.observe.memory_timeline import as_bytes
from onnxtrain.options import FallbackPolicy
from onnxtrain.report import CompileReport, PassReport, Work


def work_lines(report: CompileReport) -> Iterator[str]:
    """The work of a step, forward and backward, before and after; one line for each graph that runs it."""
    if report.before is None:
        return
    yield f"as captured: {_described(report.before)}"
    for name, found in (("after all passes", report), *report.variants.items()):
        if found.after is not None:
            yield f"{name}: {_described(found.after)}{_compared(report.before, found.after)}"


def _described(work: Work) -> str:
    return f"{_as_operations(work.flops)}, {as_bytes(work.bytes)} read and written"


def _as_operations(count: int) -> str:
    """Floating-point operations for people: "12.3 MFLOP"."""
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('', 'k', 'M', 'G', 'T')[power]}FLOP"


def _compared(before: Work, after: Work) -> str:
    if not (before.flops and before.bytes):
        return ""
    return f" ({after.flops / before.flops:.0%} and {after.bytes / before.bytes:.0%})"


def pass_lines(report: CompileReport) -> Iterator[str]:
    """What each pass did, then what it refused, with the user's module and line."""
    idle: dict[str, None] = {}
    for stage in report.stages:
        for each in stage.passes:
            if each.applied or each.refused:
                yield from _of_pass(f"{each.name} ({stage.name})", each)
            else:
                idle[f"{each.name} ({stage.name})"] = None
    if idle:
        yield f"nothing to do: {', '.join(idle)}"


def _of_pass(title: str, done: PassReport, did: str = "did") -> Iterator[str]:
    yield title
    for text, count in _counted(done.applied):
        yield f"  {did:<9}{text}{count}"
    for text, count in _counted([f"{r.node}: {r.reason}{f'  [{r.where}]' if r.where else ''}" for r in done.refused]):
        yield f"  refused  {text}{count}"


def _counted(texts: list[str] | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Each text once, with how often it comes."""
    for text in dict.fromkeys(texts):
        times = texts.count(text)
        yield text, f" ({times} times)" if times > 1 else ""


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    model_arguments(parser)
    parser.add_argument("--keep-outputs", metavar="NAME", nargs="+", help="the outputs that are read, such as loss")
    parser.add_argument("--rng", choices=("fast", "torch"), default="fast", help="as the option rng (default: fast)")


def run(options: argparse.Namespace) -> int:
    model = model_of(options)
    module = ORTModule(
        model.module,
        count_work=True,
        keep_outputs=options.keep_outputs,
        rng=options.rng,
        fallback_policy=FallbackPolicy.FALLBACK_DISABLE,  # why there is no graph is what is asked for
    )
    with only_errors(), torch.enable_grad():
        model(module)
    report = module.report()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(model.name)}[/bold]")
    for line in (*work_lines(report), *pass_lines(report)):
        console.print(line, markup=False)
    engine: Engine = module.__dict__["_engine"]
    for found in engine.newest().regions():
        for line in _of_pass(found.name, found, did="region"):
            console.print(line, markup=False)
    for name, variant in report.variants.items():
        console.print(f"[bold]{escape(model.name)}, {escape(name)}[/bold]")
        for line in pass_lines(variant):
            console.print(line, markup=False)
    return 0
