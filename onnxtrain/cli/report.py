"""`onnxtrain report MODEL`: an HTML report: graph before and after, passes, time, memory, comparison with eager."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from onnxtrain.capture.structure import flatten_output
from onnxtrain.cli.argument_types import new_file, positive
from onnxtrain.cli.model import LoadedModel, model_arguments, model_of
from onnxtrain.cli.page import write_page
from onnxtrain.frontend.ort_module import ORTModule, engine_of
from onnxtrain.frontend.verification import verify
from onnxtrain.observe.allocations import profiled
from onnxtrain.observe.logs import only_errors
from onnxtrain.observe.memory_page import section
from onnxtrain.observe.model_report.page import render
from onnxtrain.observe.model_report.values import ModelReport, Steps, node_times, read_graph
from onnxtrain.observe.step_memory import largest_tensors, predicted, recomputed_in
from onnxtrain.options import FallbackPolicy

_PROFILED_STEPS = 3
_LISTED_TENSORS = 12  # tensors listed


def arguments(parser: argparse.ArgumentParser) -> None:
    model_arguments(parser)
    parser.add_argument(
        "--html", type=new_file, default=Path("report.html"), metavar="FILE", help="the file (default: report.html)"
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="steps to time (default: 20)")


def run(options: argparse.Namespace) -> int:
    """Measure, and write the page."""
    write_page(options.html, render(measure(model_of(options), options.steps)))
    return 0


def measure(loaded: LoadedModel, steps: int) -> ModelReport:
    """Compile, verify and time a model.

    Args:
        loaded: the model and its inputs.
        steps: the number of steps to time, of eager PyTorch and of onnxtrain.

    Raises:
        ORTModuleFallbackException: the model cannot be captured as a graph.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        verdict = verify(loaded.module, loaded.batch)
    eager = copy.deepcopy(loaded.module)
    with tempfile.TemporaryDirectory() as folder, only_errors():
        ort = ORTModule(
            loaded.module,
            statistics="work",
            save_graphs=Path(folder) / "graph",
            # A variant without padding would run in place of the graph that the page shows.
            skip_padding="never",
            fallback_policy=FallbackPolicy.FALLBACK_DISABLE,
        )
        _step(loaded, ort)
        memory = _memory(ort)
        captured = read_graph("as captured", _saved(folder, "torch_exported"))
        executed = read_graph("as it runs", _saved(folder, "execution_model"))
    eager_ms, ours_ms = _time_interleaved(lambda: _step(loaded, eager), lambda: _step(loaded, ort), steps)
    with profiled() as profile:
        for _ in range(_PROFILED_STEPS):
            _step(loaded, ort)
    return ModelReport(
        name=loaded.name,
        about=_about(loaded.module),
        compiled=ort.report(),
        captured=captured,
        executed=executed,
        times=node_times(profile, {node.op for node in executed.nodes}, _PROFILED_STEPS),
        eager=Steps("eager PyTorch", eager_ms),
        ours=Steps("onnxtrain", ours_ms),
        verdict=str(verdict),
        is_right=verdict.is_right,
        memory=memory,
    )


def _saved(folder: str, stage: str) -> Path:
    (file,) = Path(folder).glob(f"graph_{stage}_*.onnx")
    return file


def _memory(model: ORTModule) -> str:
    """Return the memory of a step as planned, with its largest tensors; "" for a graph without gradients."""
    compiled = engine_of(model).newest()
    if compiled.parts is None:
        return ""
    plan, storages = compiled.timeline()
    parameters = {id(p): p.nbytes for p in (*model.parameters(), *model.buffers())}
    timeline = predicted("Memory of a step", plan, storages, {"parameters": sum(parameters.values())})
    return section(timeline, largest_tensors(plan, storages, _LISTED_TENSORS, recomputed_in(plan)))


def _about(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    parameters = list(module.parameters())
    count = sum(p.numel() for p in parameters)
    devices = sorted({str(p.device) for p in parameters}) or ["cpu"]
    return (
        ("class", type(module).__name__),
        ("parameters", f"{count:,}"),
        ("mode", "training" if module.training else "evaluation"),
        ("device", ", ".join(devices)),
        ("torch", torch.__version__),
        ("threads", str(torch.get_num_threads())),
    )


def _step(loaded: LoadedModel, module: torch.nn.Module) -> None:
    """Run forward and, if the output has a gradient, backward."""
    leaves, _ = flatten_output(loaded(module))
    ends = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    for parameter in module.parameters():
        parameter.grad = None


def _time_interleaved(
    eager: Callable[[], None], ours: Callable[[], None], steps: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the milliseconds of each step after warm-up; steps of both sides are interleaved."""
    times_ms: tuple[list[float], list[float]] = ([], [])
    for number in range(steps + max(3, steps // 2)):
        for times, step in zip(times_ms, (eager, ours), strict=True):
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= max(3, steps // 2):
                times.append((time.perf_counter() - start) * 1e3)
    return tuple(times_ms[0]), tuple(times_ms[1])
