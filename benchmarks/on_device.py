"""Time training on stock onnxruntime against eager PyTorch, with one thread each. Nothing is asserted.

Usage: python -m benchmarks.on_device [--rounds N] [--only NAME ...]

The gradient step is forward and backward. The whole step adds the AdamW update: onnxtrain's optimizer graph against
`torch.optim.AdamW(fused=True)`, PyTorch's default AdamW, and the graph of standard ops that portable artifacts have.
All variants are interleaved in one process, on the same batch.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.machine import describe_machine
from onnxtrain import artifacts
from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.onnxblock.optim import AdamW

TORCH = "torch, AdamW(fused=True)"
_RATE = 1e-3
_DECAY = 0.01
_WARM_UP = 3  # rounds


def _mlp(width: int, layers: int = 1) -> nn.Module:
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


@dataclass(frozen=True)
class Network:
    """A model and the shape of its batch."""

    title: str
    make: Callable[[], nn.Module]
    batch: tuple[int, ...]


NETWORKS: Mapping[str, Network] = {
    "mlp-0.1m": Network("MLP, 0.1 million parameters, 64 samples", lambda: _mlp(280), (64, 64)),
    "mlp-1m": Network("MLP, 1 million parameters, 64 samples", lambda: _mlp(960), (64, 64)),
    "mlp-10m": Network("MLP, 10 million parameters, 64 samples", lambda: _mlp(2240, layers=2), (64, 64)),
    "cnn": Network("CNN, two convolutions, 32 images of 28 x 28", _cnn, (32, 1, 28, 28)),
}

Step = Callable[[], object]


class _Torch:
    """Eager PyTorch."""

    def __init__(self, network: Network, fused: bool) -> None:
        torch.manual_seed(0)
        self._model = network.make().train()
        self._x, self._labels = _batch(network)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), _RATE, weight_decay=_DECAY, fused=fused)

    def gradients(self) -> None:
        self._optimizer.zero_grad()
        F.cross_entropy(self._model(self._x), self._labels).backward()

    def update(self) -> None:
        self._optimizer.step()


class _Stock:
    """The artifacts on stock onnxruntime."""

    def __init__(self, network: Network, folder: Path, plain: bool) -> None:
        x, labels = _batch(network)
        self._feeds = x.numpy(), labels.numpy()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self._module = Module(folder / "training_model.onnx", state, session_options=options)
        optimizer = f"{'plain_' if plain else ''}optimizer_model.onnx"
        self._optimizer = Optimizer(folder / optimizer, self._module)
        self._optimizer.set_learning_rate(_RATE)

    def gradients(self) -> None:
        self._module(*self._feeds)
        self._module.lazy_reset_grad()

    def update(self) -> None:
        self._optimizer.step()


def _batch(network: Network) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 10, network.batch[:1], generator=generator)
    return torch.randn(network.batch, generator=generator), labels


def _make_artifacts(network: Network, folder: Path) -> None:
    for prefix, portable in (("", False), ("plain_", True)):
        torch.manual_seed(0)
        artifacts.generate_artifacts(
            network.make(),
            example_args=_batch(network)[:1],
            loss=artifacts.LossType.CrossEntropyLoss,
            optimizer=AdamW(eps=1e-8, weight_decay=_DECAY, mode="torch"),
            artifact_directory=folder,
            prefix=prefix,
            portable=portable,
        )


def _measure(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each step in each round. The order changes with every round."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for number in range(-_WARM_UP, rounds):
            first = number % len(names)
            turns = [*names[first:], *names[:first]]
            for name in reversed(turns) if number // len(names) % 2 else turns:
                started = time.perf_counter()
                steps[name]()
                if number >= 0:
                    times[name].append(time.perf_counter() - started)
    finally:
        gc.enable()
    return times


def _table(title: str, times: Mapping[str, Sequence[float]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for header in ("median", "fastest", "speedup over torch", "quartiles"):
        table.add_column(header, justify="right")
    for name, own in times.items():
        low, middle, high = statistics.quantiles([t / o for t, o in zip(times[TORCH], own, strict=True)], n=4)
        compared = ("", "") if name == TORCH else (f"{middle:.2f}", f"{low:.2f} – {high:.2f}")
        table.add_row(name, f"{1e3 * statistics.median(own):.3f} ms", f"{1e3 * min(own):.3f} ms", *compared)
    return table


def _full_step(variant: _Torch | _Stock) -> Step:
    def step() -> None:
        variant.gradients()
        variant.update()

    return step


def main(arguments: Sequence[str]) -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_device", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=NETWORKS, default=list(NETWORKS), help="the networks")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds (default: 40)")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds: expected 2 or more, got {options.rounds}")
    torch.set_num_threads(1)
    console = Console()
    for line in describe_machine().lines():
        console.print(*line, highlight=False)
    console.print(f"onnxruntime {onnxruntime.__version__}", highlight=False)
    for name in options.only:
        network = NETWORKS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            _make_artifacts(network, folder)
            ours, plain = _Stock(network, folder, plain=False), _Stock(network, folder, plain=True)
        eager, default = _Torch(network, fused=True), _Torch(network, fused=False)
        variants = {TORCH: eager, "torch, AdamW()": default, "onnxtrain": ours, "onnxtrain, standard ops": plain}
        for variant in variants.values():  # without gradients PyTorch's update does nothing
            variant.gradients()
        gradients = {name: variants[name].gradients for name in (TORCH, "onnxtrain")}
        console.print(_table(f"{network.title}: forward and backward", _measure(gradients, options.rounds)))
        updates = {name: variant.update for name, variant in variants.items()}
        console.print(_table(f"{network.title}: update", _measure(updates, options.rounds)))
        full_steps = {name: _full_step(variant) for name, variant in variants.items()}
        console.print(_table(f"{network.title}: whole step", _measure(full_steps, options.rounds)))


if __name__ == "__main__":
    main(sys.argv[1:])
