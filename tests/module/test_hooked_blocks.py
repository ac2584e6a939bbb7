"""Under engines that work block by block in hooks, blocks become graphs, whichever came first."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import onnxtrain
from onnxtrain import ORTModule
from tests.module.test_prepare import WIDTH, Tower
from tests.thinned import slow_except

X = torch.randn(4, WIDTH)


class ZeROStage3:
    """Stands in for DeepSpeed's: parameters are empty, except while the modules that own them run."""

    def __init__(self, model: nn.Module) -> None:
        self.full = {parameter: parameter.data for parameter in model.parameters()}
        self.invalidated = 0
        self._register(model)
        self.release(self.full)

    def _register(self, module: nn.Module) -> None:
        module._parameters = _Parameters(module)
        module.register_forward_pre_hook(_profiled(_of_deepspeed(self._before())))
        module.register_forward_hook(_of_deepspeed(self._after()))
        for child in module.children():
            self._register(child)

    def gather(self, parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = self.full[parameter]

    def release(self, parameters: Any) -> None:
        for parameter in parameters:
            parameter.data = torch.empty(0)

    @contextmanager
    def gathered(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        self.gather(parameters)
        yield
        self.release(parameters)

    def _before(self) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            self.gather(_parameters(module))

        return before

    def _after(self) -> Any:
        def after(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self.release(_parameters(module))
            output.register_hook(lambda _: self.gather(_parameters(module)))

        return after

    def get_param_coordinator(self) -> ZeROStage3:
        return self

    def is_invalid_trace(self) -> bool:
        return self.invalidated > 0

    def _invalidate_trace(self) -> None:
        self.invalidated += 1


class _Parameters(OrderedDict[str, nn.Parameter | None]):
    """As DeepSpeed's: `copy` does not work."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=getattr(module, "_z3_leaf", False)))


def _of_deepspeed(hook: Any) -> Any:
    hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    return hook


def _profiled(func: Any) -> Any:
    def wrapped_fn(*args: Any) -> Any:
        return func(*args)

    wrapped_fn.__module__ = "deepspeed.utils.nvtx"
    return wrapped_fn


def losses_and_gradients(model: nn.Module, subject: nn.Module | None = None) -> list[torch.Tensor]:
    """Those of two steps; `subject` is what is called, if not the model itself."""
    seen = []
    for step in range(2):
        torch.manual_seed(step)
        loss = (subject or model)(X).square().mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return seen


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that turns a model into one under stage 3."""

    def initialize(model: nn.Module) -> ZeROStage3:
        engine = ZeROStage3(model)
        zero = SimpleNamespace(GatheredParameters=engine.gathered)
        monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=zero))
        return engine

    return initialize


@pytest.mark.parametrize(
    "first",
    slow_except(["prepare", "prepare blocks", "a step", "ORTModule", "engine"], "prepare blocks", "a step", "engine"),
)
def test_blocks_are_graphs_under_zero_stage_3(first: str, deepspeed: Any) -> None:
    torch.manual_seed(0)
    model, subject = (tower := Tower()), tower
    eager = copy.deepcopy(model)
    deepspeed(eager)
    expected = losses_and_gradients(eager)
    if first == "ORTModule":
        subject = ORTModule(model, rng="torch")
    elif first != "engine":
        onnxtrain.prepare(model, True if first == "prepare blocks" else "auto", rng="torch")
    if first == "a step":  # the first graph is of the whole model
        model(X)
        assert not onnxtrain.report_of(model).by_block
    engine = deepspeed(subject)
    if first == "engine":
        onnxtrain.prepare(model, rng="torch")
    got = losses_and_gradients(model, subject)
    assert len(got) == len(expected) == 2 * 15
    assert all(map(torch.equal, got, expected))
    subject(X)
    assert not any(parameter.numel() for parameter in model.parameters()), "not released after forward"
    report = onnxtrain.report_of(subject)
    assert [region.name for region in report.regions] == ["blocks.0", "blocks.1", "blocks.2"]
    assert all(region.compiled is not None for region in report.regions)
    assert engine.invalidated == 1
    onnxtrain.unprepare(model)
    assert not any(hasattr(module, "_z3_leaf") for module in model.modules())
    assert all(map(torch.equal, losses_and_gradients(model, subject), expected))


def test_a_model_without_blocks_is_one_leaf(deepspeed: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2))
    expected = losses_and_gradients(copy.deepcopy(model))
    for wrap in (ORTModule, onnxtrain.prepare):
        subject = wrap(copy.deepcopy(model))
        deepspeed(subject)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert all(map(torch.equal, losses_and_gradients(subject), expected))


class Words(nn.Module):
    """Embeds ids; under stage 3 its table has no rows when it is captured."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, padding_idx=padding_idx)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.table((x[:, 0] * 3).long() % 7))


@pytest.mark.parametrize("wrap", [ORTModule, onnxtrain.prepare])
def test_embeddings_under_zero_stage_3(wrap: Any, deepspeed: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Words(padding_idx) for padding_idx in (None, 0, None)))
    expected = losses_and_gradients(copy.deepcopy(model))
    subject = wrap(model)
    deepspeed(subject)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = losses_and_gradients(model, subject)
    assert all(map(torch.equal, got, expected))
    subject(X)
    assert not any(parameter.numel() for parameter in model.parameters()), "not released after forward"


def test_hooked_blocks_of_an_ortmodule_are_graphs() -> None:
    torch.manual_seed(0)
    eager = Tower()
    model = copy.deepcopy(eager)
    wrapped = ORTModule(model, rng="torch")
    wrapped(X)
    calls: list[str] = []
    for each in (eager, model):
        each.blocks[1].register_forward_hook(lambda *_: calls.append("hook"))
    expected = losses_and_gradients(eager)
    assert all(map(torch.equal, losses_and_gradients(model, wrapped), expected))
    copied = copy.deepcopy(wrapped)
    assert all(map(torch.equal, losses_and_gradients(copied), expected))
    assert len(calls) == 6
    for each in (wrapped, copied):
        report = onnxtrain.report_of(each)
        assert "blocks.1" in report.reason
        assert all(region.compiled is not None for region in report.regions)
        assert each.report() is report.regions[-1].compiled


def test_warnings_name_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.system.ranks.world_size", lambda: 2)
    monkeypatch.setattr("onnxtrain.system.ranks.rank", lambda: 1)
    monkeypatch.setattr("onnxtrain.frontend.engine._NOTABLE_S", 0.0)
    model = ORTModule(nn.Linear(WIDTH, 2))
    model(X)
    with pytest.warns(
        UserWarning,
        match=r"Linear \(rank 1 of 2\) was captured again.*dtype: .*float64.*collective",
    ):
        model.double()(X.double())
    with pytest.warns(UserWarning, match=r"Linear \(rank 1 of 2\) runs in PyTorch, not as an ONNX graph"):
        model(X.double().to_sparse())
