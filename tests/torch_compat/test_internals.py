"""Each private part of PyTorch exists, agrees with its fallback, and may be missing."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

from onnxtrain import ORTModule, torch_compat
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat import internal
from onnxtrain.torch_compat.internal import ENTRIES, VARIABLE, Internal, missing

for module in pkgutil.iter_modules(torch_compat.__path__, "onnxtrain.torch_compat."):
    importlib.import_module(module.name)

CUDA_ONLY = {"fused_rms_norm_grad"}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_part_is_available(name: str) -> None:
    entry = ENTRIES[name]
    entry.get()
    assert entry.is_available, entry.fault


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e.agrees is not None and n not in CUDA_ONLY])
def test_every_part_agrees_with_its_fallback(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.agrees is not None
    assert entry.agrees(entry.get())


@pytest.fixture
def no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal, "ENTRIES", {})


@pytest.mark.usefixtures("no_entries")
def test_a_missing_part_is_logged_once_and_replaced_by_the_fallback(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> int:
        raise AttributeError("module 'torch' has no attribute '_part'")

    entry = Internal("part", find, why="a test", fallback=7, cost="it is slower", check=bool)
    with caplog.at_level("INFO", "onnxtrain"):
        assert entry.get() == entry.get() == 7
    assert not entry.is_available
    assert [r.getMessage() for r in caplog.records] == [
        "PyTorch's part is not used (AttributeError: module 'torch' has no attribute '_part'): it is slower"
    ]


@pytest.mark.usefixtures("no_entries")
@pytest.mark.parametrize("check", [lambda part: False, lambda part: 1 / 0])
def test_a_part_that_fails_its_check_is_replaced_by_the_fallback(check: object) -> None:
    assert Internal("part", lambda: 1, why="a test", fallback=2, cost="", check=check).get() == 2  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_entries")
@pytest.mark.parametrize("names", ["part", "other,part", "all"])
def test_a_part_can_be_switched_off(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, names)
    entry = Internal("part", lambda: 1, why="a test", fallback=2, cost="", check=bool)
    assert entry.get() == 2
    assert VARIABLE in entry.fault


def test_a_part_without_a_fallback_makes_the_module_run_in_pytorch() -> None:
    with pytest.raises(CaptureError, match="this PyTorch lacks a private part that onnxtrain needs: part"):
        missing("part")(1, key=2)


def test_without_a_required_part_a_module_runs_in_pytorch_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENTRIES["version_of"], "fault", "it is lacking")
    model = ORTModule(torch.nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="not as an ONNX graph: this PyTorch lacks a private part .*: version_of"):
        model(torch.randn(3, 2)).sum().backward()


_TRAINS = """
import torch
from torch import nn
from onnxtrain import ORTModule
from tests.reference import assert_matches
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.LayerNorm(8), nn.Softplus(), nn.Linear(8, 3), nn.Softmax(-1))
def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
x = torch.randn(4, 6)
assert_matches(gradients(ORTModule(model), x), gradients, model, x)
"""


@pytest.mark.slow
def test_a_module_trains_with_the_fallback_of_every_optional_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    completed = subprocess.run([sys.executable, "-c", _TRAINS], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
