"""`onnxtrain memory MODEL`: the memory of a training step, in the terminal and as an HTML page.

Compares the step measured in eager PyTorch, predicted from onnxtrain's plan, and measured in onnxtrain.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from onnxtrain.cli.argument_types import new_file, positive
from onnxtrain.cli.model import LoadedModel, loss_of, model_arguments, model_of
from onnxtrain.cli.page import write_page
from onnxtrain.errors import OptionError
from onnxtrain.execute.compiled import Compiled
from onnxtrain.frontend.engine import Engine
from onnxtrain.frontend.entry_point import EntryPoint
from onnxtrain.observe.memory_page import COLUMNS, Chart, Tile, cells, render
from onnxtrain.observe.memory_timeline import TensorGroup, as_bytes
from onnxtrain.observe.step_memory import (
    MeasuredStep,
    activations_of,
    largest_tensors,
    measure_step,
    predicted,
    recomputed_in,
)
from onnxtrain.options import FallbackPolicy, Options
from onnxtrain.plan.lifetimes import Timeline
from onnxtrain.plan.recompute_subgraphs import find_subgraphs, subgraph_reports
from onnxtrain.plan.storage import Storages
from onnxtrain.report import SubgraphReport

_WIDTH = 150  # of tables, if the output is not a terminal
_OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    model_arguments(parser)
    parser.add_argument(
        "--optimizer",
        choices=[*_OPTIMIZERS, "none"],
        default="adamw",
        help="the optimizer whose state is counted (default: adamw)",
    )
    parser.add_argument(
        "--largest", type=positive, default=20, metavar="N", help="the number of tensors to list (default: 20)"
    )
    parser.add_argument(
        "--subgraphs", action="store_true", help="list the recomputable subgraphs for the option recompute"
    )
    parser.add_argument(
        "--budget", metavar="BYTES", help="the option memory_budget_bytes: bytes, a fraction such as 0.5, or auto"
    )
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write the timelines to an HTML page")


def run(options: argparse.Namespace) -> int:
    """Print the peaks and the largest tensors; write the page if asked to."""
    loaded = model_of(options)
    name = type(loaded.module).__name__
    eager_module = copy.deepcopy(loaded.module)
    eager = _measure("Measured in eager PyTorch", loaded, eager_module, eager_module, options.optimizer)
    keep_all, keep_all_storages, keep_all_engine = _planned(copy.deepcopy(eager_module), loaded, recompute="none")
    plan, storages, engine = _planned(loaded.module, loaded, memory_budget_bytes=options.budget)
    ours = _measure("Measured", loaded, loaded.module, lambda *args, **kwargs: engine(args, kwargs), options.optimizer)
    tensors = largest_tensors(plan, storages, options.largest, recomputed_in(plan))
    peaks = {
        "eager PyTorch, measured": eager.activations,
        "onnxtrain without recomputation, predicted": activations_of(keep_all),
        "onnxtrain, predicted": activations_of(plan),
        "onnxtrain, measured": ours.activations,
    }
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH)
    console.print(_peaks(peaks, ours))
    console.print(_tensors(tensors))
    if options.subgraphs:
        rows = _recomputable(keep_all_engine.newest(), keep_all_storages, recomputed_in(plan))
        console.print(_subgraphs(rows))
    if options.html is not None:
        charts = (
            Chart(eager.timeline, "The allocator's events of one step."),
            Chart(predicted("Predicted from the plan", plan, storages, ours.state), "Computed from the input sizes."),
            Chart(ours.timeline, "The allocator's events of one step."),
        )
        about = f"One training step of {loaded.name}, optimizer {options.optimizer}; gradients start as None."
        tiles = [Tile(as_bytes(count), f"activations, {name}") for name, count in peaks.items()]
        write_page(options.html, render(f"Memory of {name}", about, tiles, charts, tensors))
    return 0


def _planned(module: torch.nn.Module, loaded: LoadedModel, **options: Any) -> tuple[Timeline, Storages, Engine]:
    """Return the plan of a module at the sizes of the loaded inputs, and its engine, after one step."""
    # Timing candidate kernels, or a variant without padding, would make this step differ from the plan.
    settings = Options.resolve(fallback_policy=FallbackPolicy.FALLBACK_DISABLE, **options)
    engine = Engine(module, replace(settings, tuning=False, skip_padding="never"), EntryPoint(is_part=True))
    loss_of(engine(loaded.args, loaded.kwargs)).backward()
    module.zero_grad()
    return *engine.newest().timeline(), engine


def _recomputable(compiled: Compiled, storages: Storages, recomputed: Collection[str]) -> Sequence[SubgraphReport]:
    """Return the subgraphs of a plan without recomputation; `recomputed` names what the plan that runs recomputes."""
    parts = compiled.parts
    if compiled.report.subgraphs or parts is None:
        return compiled.report.subgraphs
    mutated = [parts.forward.inputs[mutation.target] for mutation in compiled.captured.mutations]
    values = [v for v in parts.kept if f"{v.name}/recomputed" in recomputed]
    return subgraph_reports(find_subgraphs(parts, storages, mutated), values)


def _measure(
    title: str, loaded: LoadedModel, module: torch.nn.Module, run: Callable[..., Any], optimizer: str
) -> MeasuredStep:
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        raise OptionError(
            "MODEL has no trainable parameters.",
            where=loaded.name,
            expected="at least one parameter with requires_grad=True",
            got="none",
            todo="name another model",
        )
    stepper = None if optimizer == "none" else _OPTIMIZERS[optimizer](parameters)
    return measure_step(title, module, stepper, lambda: run(*loaded.args, **loaded.kwargs), loss_of)


def _peaks(peaks: Mapping[str, int], step: MeasuredStep) -> Table:
    result = Table(header_style="bold", title="peak of activations", title_justify="left")
    result.add_column("step")
    result.add_column("bytes", justify="right")
    for name, count in peaks.items():
        result.add_row(name, as_bytes(count))
    for name, count in step.state.items():
        result.add_row(f"{name}, persistent", as_bytes(count))
    return result


def _tensors(tensors: Sequence[TensorGroup]) -> Table:
    result = Table(header_style="bold", title="largest tensors", title_justify="left")
    for name, is_number in COLUMNS:
        result.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for group in tensors:
        result.add_row(*(cell.replace("[", r"\[") for cell in cells(group)))
    return result


def _subgraphs(rows: Sequence[SubgraphReport]) -> Table:
    result = Table(header_style="bold", title="activations that can be recomputed", title_justify="left")
    for name in ("saves", "count", "status", "recompute"):
        result.add_column(name, justify="right" if name in ("saves", "count") else "left", overflow="fold")
    for row in rows:
        result.add_row(as_bytes(row.saved_bytes), str(row.frequency), row.status, row.config)
    return result
