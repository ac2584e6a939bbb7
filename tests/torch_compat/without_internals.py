"""Train models while private parts of PyTorch are switched off, each run in a fork of one process.

    python -m tests.torch_compat.without_internals WITHOUT=MODEL,MODEL... ...

WITHOUT is a value of ONNXTRAIN_WITHOUT_INTERNALS: names of entries of `torch_compat`, `all`, or nothing. Prints a line
of JSON per model (`Outcome`). Entries are resolved when onnxtrain is imported, so each run needs a process that has not
imported it. The parent imports everything else, which takes most of the time.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.entry import BATCHES, Call, Draw, ZooModel, mean_square
from tests.zoo.models import ZOO


class Layers(nn.Module):
    """Layers that ATen computes with kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.layers = nn.Sequential(
            nn.PReLU(), nn.ELU(), nn.Hardsigmoid(), nn.Hardswish(), nn.Hardtanh(-0.4, 0.4), nn.LeakyReLU(),
            nn.Softplus(), nn.Softshrink(0.1), nn.RMSNorm(24), nn.Softmax(-1), nn.LayerNorm(24), nn.LogSoftmax(-1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.glu(self.layers(self.first(x)), -1)  # type: ignore[no-any-return]


class Pools(nn.Module):
    """Poolings of images and volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.volumes = nn.Conv2d(2, 3, 3), nn.Conv3d(1, 2, 3)

    def forward(self, x: torch.Tensor, volumes: torch.Tensor) -> torch.Tensor:
        a = self.images(x)
        a = F.avg_pool2d(F.max_pool2d(a, 2, 1, return_indices=True)[0], 2, 1)
        b = self.volumes(volumes)
        b = F.avg_pool3d(F.max_pool3d(b, 2, 1, return_indices=True)[0], 2, 1)
        pooled = (
            *(F.adaptive_avg_pool2d(a, 2), F.adaptive_max_pool2d(a, 2)),
            *(F.adaptive_avg_pool3d(b, 2), F.adaptive_max_pool3d(b, 2)),
        )
        return torch.cat([each.flatten(1) for each in pooled], 1)


class Losses(nn.Module):
    """The losses that ATen computes with kernels of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        losses = (F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.soft_margin_loss)
        return F.binary_cross_entropy(torch.sigmoid(y), target.sigmoid()) + sum(loss(y, target) for loss in losses)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(True)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class Custom(nn.Module):
    """A custom autograd function, and indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = _Square.apply(self.first(x))
        return self.last(hidden[torch.arange(x.shape[0]).flip(0)])  # type: ignore[no-any-return]


def _images(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, 2, 9, 8, grad=True), draw.floats(batch, 1, 8, 9, 8)))


def _pairs(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, 16, grad=True), draw.floats(batch, 4)))


def _features(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, 16, grad=True),))


MODELS = {
    entry.name: entry
    for entry in (
        *ZOO,
        ZooModel("layers", Layers, _features, mean_square, BATCHES),
        ZooModel("pools", Pools, _images, mean_square, BATCHES),
        ZooModel("losses", Losses, _pairs, lambda loss: loss, BATCHES),
        ZooModel("custom-function", Custom, _features, mean_square, BATCHES),
    )
}


PRELOADED = ("torch.export._trace", "torch._dynamo", "torch._decomp", "torch._refs", "torch._inductor.decomposition")


@dataclass(frozen=True)
class Outcome:
    """The captures of a model, the most that are right, the fallback warnings, and the error if it is wrong."""

    without: str
    model: str
    captures: int = 0
    max_captures: int = 0
    fallbacks: tuple[str, ...] = ()
    error: str = ""


def outcomes(runs: Mapping[str, Sequence[str]]) -> Iterator[Outcome]:
    """Train models without the given entries: a process per key of `runs`, one after another."""
    command = [sys.executable, "-m", __name__, *(f"{without}={','.join(models)}" for without, models in runs.items())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield Outcome(**json.loads(line))


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    assert "onnxtrain" not in sys.modules, "its entries are resolved"
    for run in sys.argv[1:]:
        without, _, models = run.rpartition("=")
        if not (process := os.fork()):
            os.environ["ONNXTRAIN_WITHOUT_INTERNALS"] = without
            for name in models.split(","):
                write(train(without, name))
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if status:
            write(Outcome(without, models, error=f"the process ended with status {status}"))


def write(outcome: Outcome) -> None:
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
    sys.stdout.flush()


def train(without: str, name: str) -> Outcome:
    """Compare a model's gradients at all its sizes with eager's, and its parameters after two steps."""
    entry = MODELS[name]
    try:
        from tests.torch_version import max_captures
        from tests.zoo.checks import Comparison, count_captures, fallbacks
        from tests.zoo.test_zoo import MOMENTUM

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compare = Comparison(entry)
            for sizes in entry.sizes:
                compare.train(*sizes)
            compare.train_steps(MOMENTUM)
        captures = count_captures(compare.got.run)
        most = max_captures(compare.got.run) if captures else 0
        return Outcome(without, name, captures, most, tuple(fallbacks(caught)))
    except Exception:  # noqa: BLE001  each error is an outcome
        return Outcome(without, name, error=traceback.format_exc())


if __name__ == "__main__":
    main()
