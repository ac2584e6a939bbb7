"""The examples train."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOSSES = {  # an example that returns losses: the share of the first one that the last one stays below
    "plain_loop": 0.1,
    "custom_function": 0.3,
    "training_artifacts": 0.3,
    "accelerate_loop": 0.3,
    "lightning_module": 0.1,
    "lora": 0.85,
    "huggingface_trainer": 0.3,
}
SLOW = ("accelerate_loop", "lightning_module", "lora", "huggingface_trainer")  # their imports take seconds


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in LOSSES])
def test_the_loss_falls(name: str) -> None:
    losses = importlib.import_module(f"examples.{name}").main()
    assert losses[-1] < LOSSES[name] * losses[0]


def test_the_cnn_recognizes_digits() -> None:
    assert importlib.import_module("examples.cnn").main() > 0.9


def test_the_budget_holds() -> None:
    peaks = importlib.import_module("examples.memory_budget").main()
    assert peaks["budget 0.5"] < peaks["onnxtrain"] < peaks["eager"]


def test_each_example_is_short_and_tested() -> None:
    files = {file.stem: file.read_text() for file in (ROOT / "examples").glob("*.py") if file.stem != "__init__"}
    # tests/distributed/test_torchrun.py runs these.
    with_torchrun = {f"torchrun_{name}" for name in ("ddp", "fsdp2", "zero3", "tp", "pipeline", "sharded_graph")}
    assert files.keys() == {*LOSSES, *with_torchrun, "cnn", "memory_budget"}
    assert all(40 <= text.count("\n") <= 100 for text in files.values())
