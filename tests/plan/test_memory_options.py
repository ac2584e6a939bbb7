"""The option recompute, by patterns of subgraphs and by layers, and its former names."""

from __future__ import annotations

import copy
import json
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from onnxtrain import ORTModule
from onnxtrain.errors import OptionError
from onnxtrain.observe.allocations import peak_bytes, record
from onnxtrain.options import Options, SubgraphConfig
from tests.thinned import slow_except

WIDTH = 48  # a matmul is not a cheap node


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Network(nn.Module):
    """Numbered layers, and BatchNorm, whose buffers forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.norm(x) * 2)


def train(module: nn.Module, **options: Any) -> tuple[ORTModule, list[torch.Tensor]]:
    """A step at each of some sizes; the gradients, sums of all, and buffers."""
    mine = copy.deepcopy(module)
    model = ORTModule(mine, rng="torch", **options)
    for rows in (6, 3, 9):
        torch.manual_seed(rows)
        model(torch.randn(rows, WIDTH)).square().sum().backward()
    gradients = [p.grad for p in mine.parameters() if p.grad is not None]
    return model, [tensor.clone() for tensor in (*gradients, *mine.buffers())]


def kept_bytes(model: ORTModule) -> int:
    """Return the peak of a step, without the gradients, which exist before it."""

    def step() -> None:
        model(torch.ones(512, WIDTH)).square().sum().backward()

    step()
    return peak_bytes(record(step).allocations)


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Network()


@pytest.fixture(scope="module")
def plain(module: nn.Module) -> tuple[int, list[torch.Tensor]]:
    model, tensors = train(module, recompute="none")
    return kept_bytes(model), tensors


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "Gelu+:1:-1"},
        {"recompute": "Gelu+:1:2"},
        {"recompute": "layers"},
        {"recompute": "all"},
        {"recompute": "layers", "early_gradients": True},
    ],
    ids=str,
)
def test_less_is_kept_and_no_bit_changes(
    options: dict[str, Any], module: nn.Module, plain: tuple[int, list[torch.Tensor]]
) -> None:
    model, tensors = train(module, **options)
    assert all(map(torch.equal, tensors, plain[1]))
    assert len(tensors) == len(plain[1])
    assert any(stage.applied for stage in model.report().stages if stage.name == "plan")
    assert kept_bytes(model) < plain[0]


class Normed(Block):
    """Hands the result of a cheap node to the next layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(super().forward(x), (WIDTH,))


def test_the_second_level_keeps_the_tensors_between_layers() -> None:
    """Else backward would compute all layers again at once, and hold as much as without."""
    peaks = []
    for level in ("layers", "all"):
        torch.manual_seed(0)
        model = ORTModule(nn.Sequential(*[Normed() for _ in range(4)]), rng="torch", recompute=level)
        peaks.append(kept_bytes(model))
    assert peaks[1] <= peaks[0]


class Chain(nn.Module):
    """Layers that hand all that they compute to the next: none keeps anything for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


class Wide(nn.Module):
    """Layers of which each keeps more if it is recomputed: a small sum of two large results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.layer_norm(nn.functional.silu(layer(x, x)) * x, (WIDTH,))
        return x


@pytest.mark.parametrize("make", slow_except([Chain, Wide, Network], Chain, Network))
@pytest.mark.parametrize("level", slow_except(["layers", "all"], "layers"))
def test_a_level_never_raises_the_peak_over_the_defaults(make: type[nn.Module], level: str) -> None:
    torch.manual_seed(0)
    module = make()
    default, levelled = (
        kept_bytes(ORTModule(copy.deepcopy(module), rng="torch", **options)) for options in ({}, {"recompute": level})
    )
    assert levelled <= default


def test_the_log_tells_that_layers_would_raise_the_peak(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    torch.manual_seed(0)
    model = ORTModule(Chain(), rng="torch", recompute="layers")
    model(torch.ones(512, WIDTH)).square().sum().backward()
    assert "the values of layers alone would raise the peak; the default ones are recomputed in addition" in caplog.text


def test_checkpoints_are_recomputed_beside_layers() -> None:
    class Checkpointed(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    counts = []
    for recompute in ("cheap", "layers", "Gelu+:1:-1"):
        torch.manual_seed(0)
        model = ORTModule(Checkpointed(), rng="torch", recompute=recompute)
        model(torch.ones(512, WIDTH)).square().sum().backward()
        (applied,) = [stage.applied for stage in model.report().stages if stage.name == "plan"]
        counts.append(int(applied[0].split()[1]))
    assert counts[0] <= min(counts[1:])


def test_a_count_and_a_kind_decide_how_many(module: nn.Module) -> None:
    done = []
    for config in ("Gelu+:1:-1", "Gelu+:1:1", "Gelu+:0:-1"):
        model, _ = train(module, recompute=config)
        (row,) = [row for row in model.report().subgraphs if row.pattern == "Gelu+"]
        assert row.frequency == 4
        assert row.saved_bytes == 4 * 6 * 4 * WIDTH * 4  # of 4 layers, at the sizes of the first call
        assert row.config == "Gelu+:1:-1"
        done.append(row.recomputed)
    assert done == [4, 1, 0]


def test_subgraphs_with_gemms_are_listed_last_and_recomputed_only_by_name(module: nn.Module) -> None:
    model, tensors = train(module, recompute="Gelu+:1:-1")
    rows = model.report().subgraphs
    with_gemm = ["Linear" in row.pattern for row in rows]
    assert with_gemm == sorted(with_gemm)
    assert any(with_gemm)
    assert not any(row.recomputed for row, has_gemm in zip(rows, with_gemm, strict=True) if has_gemm)
    (named, *_) = (row for row, has_gemm in zip(rows, with_gemm, strict=True) if has_gemm)
    model, by_name = train(module, recompute=named.config)
    assert [row.recomputed for row in model.report().subgraphs if row.pattern == named.pattern] == [named.frequency]
    assert all(map(torch.equal, tensors, by_name))


def test_the_summary_is_logged(module: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    train(module, recompute="Gelu+:1:2,Gello+:1:-1")
    (text,) = [r.getMessage() for r in caplog.records if "memory optimization: recompute=" in r.getMessage()]
    assert "recompute=Gelu+:1:2,Gello+:1:-1" in text
    assert any(line.startswith("Gelu+ ") and "2 of 4 recomputed" in line for line in text.splitlines())
    assert "no kept activation matches the pattern Gello+; did you mean Gelu+?" in caplog.text


@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_is_the_outermost_numbered_submodule(nested: bool) -> None:
    """The parts of a layer may have numbers of their own."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers)
    ours, _ = train(nn.Sequential(OrderedDict(body=model)) if nested else model, recompute="layers")
    rows = {row.pattern: row.recomputed for row in ours.report().subgraphs}
    assert rows["Linear+"] == rows["Gelu+"] == 3


def test_a_model_without_layers_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ORTModule(nn.Linear(2, 2), recompute="layers")(torch.ones(1, 2)).sum().backward()
    assert "recompute has no effect" in caplog.text


def test_nothing_is_planned_without_the_options(module: nn.Module) -> None:
    model, _ = train(module)
    assert model.report().subgraphs == ()


# The forms of the options


@pytest.mark.parametrize("variable", ["ORTMODULE_MEMORY_OPT_CONFIG", "ORTMODULE_ENABLE_MEMORY_ALLEVIATION"])
def test_patterns_as_text(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "BiasGelu+:1:-1, Cast+Where+:2:3")
    expected = SubgraphConfig("BiasGelu+", 1, -1), SubgraphConfig("Cast+Where+", 2, 3)
    assert Options.resolve().recompute == expected


def test_patterns_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "recompute.json"
    file.write_text(json.dumps(["BiasGelu+:1:-1", "Cast+Where+:0:3"]))
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", str(file))
    expected = SubgraphConfig("BiasGelu+", 1, -1), SubgraphConfig("Cast+Where+", 0, 3)
    assert Options.resolve().recompute == expected


@pytest.mark.parametrize(
    "text", ["Gelu", "Gelu+", "Gelu+:3:-1", "Gelu+:1:-2", "Gelu:1:1", "Gelu+:1", "there/is/no.json"]
)
def test_bad_patterns(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_CONFIG", text)
    with pytest.raises(OptionError, match="ORTMODULE_MEMORY_OPT_CONFIG"):
        Options.resolve()


@pytest.mark.parametrize("content", ['{"Gelu+": 1}', "[1]", "["])
def test_bad_files(tmp_path: Path, content: str) -> None:
    file = tmp_path / "recompute.json"
    file.write_text(content)
    with pytest.raises(OptionError, match="recompute"):
        Options.resolve(recompute=str(file))


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    assert Options.resolve().recompute == "layers"
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "2")
    assert Options.resolve().recompute == "all"
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "3")
    with pytest.raises(OptionError, match="0, 1 or 2"):
        Options.resolve()


def test_a_budget_and_a_level_are_two_answers_to_one_question(module: nn.Module) -> None:
    with pytest.raises(OptionError, match="memory_budget_bytes"):
        Options.resolve(memory_budget_bytes=0.5, recompute="layers")
