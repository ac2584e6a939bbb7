"""Assigned settings of ONNX Runtime Training's modules take effect, or raise a warning that they have none."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import onnxtrain.dropin  # noqa: F401  puts onnxruntime.training in place
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.options import table

TRAINING = "onnxruntime.training"


@pytest.fixture
def ortmodule() -> Iterator[Any]:
    module = importlib.import_module(f"{TRAINING}.ortmodule")
    before = dict(vars(module))
    yield module
    vars(module).update(before)
    table._REPLACED_DEFAULTS.clear()


class Asks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) + 1 > 0 else -x


def test_the_fallback_policy(ortmodule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = importlib.import_module(f"{TRAINING}.ortmodule._fallback")
    ortmodule.ORTMODULE_FALLBACK_POLICY = fallback._FallbackPolicy.FALLBACK_DISABLE
    ortmodule.ORTMODULE_FALLBACK_RETRY = True
    with pytest.raises(fallback.ORTModuleFallbackException):
        ortmodule.ORTModule(Asks())(torch.ones(2))
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_TORCH_MODEL")  # it wins
    module = ortmodule.ORTModule(Asks(), pieces=False)
    with pytest.warns(UserWarning, match="runs in PyTorch"):
        module(torch.ones(2))
    assert not engine_of(module)._entries  # it is tried again


@pytest.mark.parametrize("name", ["ONNX_OPSET_VERSION", "ORTMODULE_ONNX_OPSET_VERSION"])
def test_the_opset(name: str, ortmodule: Any, tmp_path: Path) -> None:
    setattr(ortmodule, name, 17)
    options = ortmodule.DebugOptions(save_onnx=True, onnx_prefix="linear", save_path=str(tmp_path))
    ortmodule.ORTModule(torch.nn.Linear(2, 2), options)(torch.ones(1, 2)).sum().backward()
    versions = {onnx.load(path).opset_import[0].version for path in tmp_path.iterdir()}
    assert versions == {17}


def test_an_opset_that_cannot_express_the_graph_stops_no_step(
    ortmodule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "15")
    options = ortmodule.DebugOptions(save_onnx=True, onnx_prefix="norm", save_path=str(tmp_path))
    module = ortmodule.ORTModule(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4)), options)
    module(torch.ones(3, 2)).sum().backward()
    assert len(list(tmp_path.iterdir())) == 4
    exported = onnx.load(tmp_path / "norm_torch_exported_training.onnx")
    assert exported.opset_import[0].version == 17
    assert "in opset 17 instead of 15" in caplog.text


@pytest.mark.parametrize("calls", [1, 3])
def test_each_mode_has_its_files(calls: int, ortmodule: Any, tmp_path: Path) -> None:
    """Of a module whose graph is the same in both modes, too."""
    options = ortmodule.DebugOptions(save_onnx=True, onnx_prefix="m", save_path=str(tmp_path))
    module = ortmodule.ORTModule(torch.nn.Linear(2, 2), options)
    for training in (True, False):
        module.train(training)
        for _ in range(calls):
            module(torch.ones(3, 2)).sum().backward()
    stages = ("torch_exported", "optimized_pre_grad", "optimized", "execution_model")
    modes = ("training", "inference")
    assert {path.name for path in tmp_path.iterdir()} == {f"m_{s}_{mode}.onnx" for s in stages for mode in modes}


def test_settings_without_effect_raise_a_warning(ortmodule: Any) -> None:
    with pytest.warns(UserWarning, match="ORTMODULE_TORCH_CPP_DIR has no effect"):
        ortmodule.ORTMODULE_TORCH_CPP_DIR = "/nowhere"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ortmodule.ORTMODULE_IS_DETERMINISTIC = False


def test_determinism_is_pytorchs(ortmodule: Any) -> None:
    try:
        ortmodule.ORTMODULE_IS_DETERMINISTIC = True
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        ortmodule.ORTMODULE_IS_DETERMINISTIC = True
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with pytest.warns(UserWarning, match=r"ORTMODULE_IS_DETERMINISTIC = False has no effect: .*deterministic_alg"):
            ortmodule.ORTMODULE_IS_DETERMINISTIC = False
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_custom_autograd_functions_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxruntime.training.ortmodule._custom_autograd_function import enable_custom_autograd_support

    from onnxtrain.options import Options

    monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "1")
    for enabled in (False, True):
        enable_custom_autograd_support(enabled)
        assert Options.resolve().custom_autograd is enabled


def test_the_seed_determines_dropout() -> None:
    training = importlib.import_module(TRAINING)
    module, x = training.ORTModule(torch.nn.Dropout(0.5)), torch.ones(64)
    outputs = []
    for seed in (7, 7, 8):
        training.set_seed(seed)
        outputs.append(module(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_modules_log_at_their_own_levels(ortmodule: Any, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, root.handlers[:] = [*root.handlers], []
    try:
        levels = ortmodule.LogLevel
        modules = {
            name: ortmodule.ORTModule(type(name, (torch.nn.Linear,), {})(2, 2), *options)
            for name, options in (
                ("Talks", (ortmodule.DebugOptions(log_level=levels.INFO),)),
                ("Chatters", (ortmodule.DebugOptions(log_level=levels.VERBOSE),)),
                ("Whispers", (ortmodule.DebugOptions(log_level=levels.ERROR),)),
                ("Default", ()),
            )
        }
        for module in modules.values():
            module(torch.ones(1, 2))
    finally:
        root.handlers[:] = handlers
    lines = capsys.readouterr().err.splitlines()
    levels_by_module = {name: {line.split()[0] for line in lines if f"{name}:" in line} for name in modules}
    assert levels_by_module == {
        "Talks": {"INFO"},
        "Chatters": {"INFO", "DEBUG", "DEVINFO"},
        "Whispers": set(),
        "Default": set(),
    }
