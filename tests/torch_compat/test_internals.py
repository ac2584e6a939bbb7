"""Each private part of PyTorch is there, behaves like what takes its place, and can be missing."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

from onnxtrain import torch_compat
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat import internal
from onnxtrain.torch_compat.internal import ENTRIES, VARIABLE, Internal, missing

for module in pkgutil.iter_modules(torch_compat.__path__, "onnxtrain.torch_compat."):
    importlib.import_module(module.name)

CUDA_ONLY = {"fused_rms_norm_grad"}


@pytest.mark.parametrize("name", ENTRIES)
def test_it_is_there(name: str) -> None:
    entry = ENTRIES[name]
    if name == "cuda_runner" and torch.version.cuda is None:
        pytest.skip("PyTorch was built without CUDA")
    entry.get()
    assert entry.is_available, entry.fault


@pytest.mark.parametrize("name", [n for n, e in ENTRIES.items() if e.agrees is not None and n not in CUDA_ONLY])
def test_it_agrees_with_what_takes_its_place(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.agrees is not None
    assert entry.agrees(entry.get())


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal, "ENTRIES", {})


@pytest.mark.usefixtures("fresh")
def test_a_part_that_is_missing_is_said_once_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> int:
        raise AttributeError("module 'torch' has no attribute '_part'")

    entry = Internal("part", find, why="a test", without=7, cost="it is slower", check=bool)
    with caplog.at_level("INFO", "onnxtrain"):
        assert entry.get() == entry.get() == 7
    assert not entry.is_available
    assert [r.getMessage() for r in caplog.records] == [
        "PyTorch's part is not used (AttributeError: module 'torch' has no attribute '_part'): it is slower"
    ]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("check", [lambda found: False, lambda found: 1 / 0])
def test_a_part_that_fails_its_check_is_replaced(check: object) -> None:
    assert Internal("part", lambda: 1, why="a test", without=2, cost="", check=check).get() == 2  # type: ignore[arg-type]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("names", ["part", "other,part", "all"])
def test_a_part_can_be_switched_off(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, names)
    entry = Internal("part", lambda: 1, why="a test", without=2, cost="", check=bool)
    assert entry.get() == 2
    assert VARIABLE in entry.fault


def test_what_nothing_replaces_lets_the_module_run_in_pytorch() -> None:
    with pytest.raises(CaptureError, match="this PyTorch lacks a private part that onnxtrain needs: part"):
        missing("part")(1, key=2)


_TRAINS = """
import torch
from torch import nn
from onnxtrain import ORTModule
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.LayerNorm(8), nn.Softplus(), nn.Linear(8, 3), nn.Softmax(-1))
x = torch.randn(4, 6)
model(x).square().sum().backward()
expected = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
wrapped = ORTModule(model)
wrapped(x).square().sum().backward()
assert all(torch.allclose(p.grad, e, atol=1e-5) for p, e in zip(model.parameters(), expected))
"""


def test_a_module_trains_without_any_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    done = subprocess.run([sys.executable, "-c", _TRAINS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
