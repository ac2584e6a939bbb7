"""`onnxtrain explain MODEL`: what each pass applied and refused, the cost before and after, and the fused regions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.markup import escape

from onnxtrain.cli.model import model_arguments, model_of
from onnxtrain.frontend.ort_module import ORTModule, engine_of
from onnxtrain.observe.logs import only_errors
from onnxtrain.observe.memory_timeline import as_bytes
from onnxtrain.options import FallbackPolicy
from onnxtrain.report import CompileReport, PassReport, Work


def work_lines(report: CompileReport) -> Iterator[str]:
    """Yield the cost of a step, forward and backward, before and after; one line for each variant of the graph."""
    if report.before is None:
        return
    yield f"as captured: {_described(report.before)}"
    for name, variant in (("after all passes", report), *report.variants.items()):
        if variant.after is not None:
            yield f"{name}: {_described(variant.after)}{_ratio(report.before, variant.after)}"


def _described(work: Work) -> str:
    return f"{_as_operations(work.flops)}, {as_bytes(work.bytes)} read and written"


def _as_operations(count: int) -> str:
    """Format a number of floating-point operations: "12.3 MFLOP"."""
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.{1 if power else 0}f} {('', 'k', 'M', 'G', 'T')[power]}FLOP"


def _ratio(before: Work, after: Work) -> str:
    if not (before.flops and before.bytes):
        return ""
    return f" ({after.flops / before.flops:.0%} and {after.bytes / before.bytes:.0%})"


def pass_lines(report: CompileReport) -> Iterator[str]:
    """Yield the changes that each pass applied, then those it refused, with module and source location."""
    idle: dict[str, None] = {}
    for stage in report.stages:
        for pass_report in stage.passes:
            title = f"{pass_report.name} ({stage.name})"
            if pass_report.applied or pass_report.refused:
                yield from _lines_of_pass(title, pass_report)
            else:
                idle[title] = None
    if idle:
        yield f"nothing to do: {', '.join(idle)}"


def _lines_of_pass(title: str, report: PassReport, label: str = "applied") -> Iterator[str]:
    yield title
    for text, count in _counted(report.applied):
        yield f"  {label:<9}{text}{count}"
    for text, count in _counted([f"{r.node}: {r.reason}{f'  [{r.where}]' if r.where else ''}" for r in report.refused]):
        yield f"  refused  {text}{count}"


def _counted(texts: list[str] | tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each distinct text, with the number of times it occurs."""
    for text in dict.fromkeys(texts):
        times = texts.count(text)
        yield text, f" ({times} times)" if times > 1 else ""


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    model_arguments(parser)
    parser.add_argument("--keep-outputs", metavar="NAME", nargs="+", help="the outputs to compute, such as loss")
    parser.add_argument("--rng", choices=("fast", "torch"), default="fast", help="the option rng (default: fast)")


def run(options: argparse.Namespace) -> int:
    """Print the cost, the passes and the fused regions."""
    model = model_of(options)
    module = ORTModule(
        model.module,
        statistics="work",
        keep_outputs=options.keep_outputs,
        rng=options.rng,
        fallback_policy=FallbackPolicy.FALLBACK_DISABLE,  # the user asks why there is no graph
    )
    with only_errors(), torch.enable_grad():
        model(module)
    report = module.report()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"[bold]{escape(model.name)}[/bold]")
    for line in (*work_lines(report), *pass_lines(report)):
        console.print(line, markup=False)
    for regions in engine_of(module).newest().regions():
        for line in _lines_of_pass(regions.name, regions, label="region"):
            console.print(line, markup=False)
    for name, variant in report.variants.items():
        console.print(f"[bold]{escape(model.name)}, {escape(name)}[/bold]")
        for line in pass_lines(variant):
            console.print(line, markup=False)
    return 0
