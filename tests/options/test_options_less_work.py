"""The options that skip dead rows, and the variables of ONNX Runtime Training for them."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onnxtrain import ORTModule
from tests.passes.less_work import applied_by

CLASSES, WIDTH, IGNORED = 30, 8, -100
PASSES = ("hoist_gathers", "skip_ignored_labels", "chunk_losses", "pack_tokens")


class Words(nn.Module):
    """A target for every pass: padding in attention, ignored labels, a vocabulary, a pooled first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH, padding_idx=0)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, CLASSES)
        self.first = nn.Linear(WIDTH, 1)

    def forward(self, words: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        heads = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(heads, heads, heads, mask[:, None, None, :].bool())
        hidden = torch.tanh(self.mix(seen.transpose(1, 2).flatten(2)))
        loss = F.cross_entropy(self.score(hidden).view(-1, CLASSES), labels.view(-1))
        return loss + torch.tanh(self.first(torch.tanh(self.mix(hidden))[:, 0])).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Half of the tokens are padding, and a quarter have a label."""
    words = torch.arange(40).view(2, 20) % (CLASSES - 1) + 1
    mask = torch.ones_like(words)
    mask[:, 10:] = 0
    labels = words.masked_fill((torch.arange(20) % 2 == 0) | (mask == 0), IGNORED)
    return words.masked_fill(mask == 0, 0), mask, labels


def changed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[str]:
    """The passes that changed the graph."""
    monkeypatch.setattr(importlib.import_module("onnxtrain.passes.chunk_losses"), "MIN_CLASSES", CLASSES)
    model = ORTModule(Words(), **options)
    model(*batch()).backward()
    return {name for name in PASSES if applied_by(model, name)}


OFF = [
    (
        {"disabled_passes": "skip_ignored_labels,hoist_gathers,chunk_losses", "skip_padding": "never"},
        ("ORTMODULE_ENABLE_COMPUTE_OPTIMIZER",),
        set(PASSES),
    ),
    (
        {"disabled_passes": "skip_ignored_labels"},
        ("ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER", "ORTMODULE_ENABLE_LABEL_SPARSITY_OPT"),
        {"skip_ignored_labels", "pack_tokens"},  # all rows of the scores are read then
    ),
    ({"disabled_passes": "chunk_losses"}, ("ONNXTRAIN_CHUNKED_LOSS",), {"chunk_losses"}),
    ({"skip_padding": "never"}, ("ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER",), {"pack_tokens"}),
]


def test_all_are_on_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed(monkeypatch) == set(PASSES)


@pytest.mark.parametrize(
    ("option", "variables", "lacks"), OFF, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_each_can_be_switched_off(
    option: dict[str, Any], variables: tuple[str, ...], lacks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert changed(monkeypatch, **option) == set(PASSES) - lacks
    for variable in variables:
        monkeypatch.setenv(variable, "0")
        assert changed(monkeypatch) == set(PASSES) - lacks, variable
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("way", ["option", "ORTMODULE_PRINT_INPUT_DENSITY", "ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR"])
def test_the_density_of_each_step_is_printed(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if way != "option":
        monkeypatch.setenv(way, "1")
    model = ORTModule(Words(), **({"statistics": "input_density"} if way == "option" else {}))
    words, mask, labels = batch()
    model(words, mask, labels).backward()
    model(words, torch.ones_like(mask), words.clone()).backward()
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Words step 0: .*", first)
    assert {"50.0% of 40 tokens are real in words", "50.0% of 40 tokens are seen in mask"} <= set(shown(first))
    assert "25.0% of 40 labels count in labels" in shown(first)
    assert "100.0% of 40 tokens are seen in mask" in shown(second)
    assert "100.0% of 40 labels count in labels" in shown(second)


def shown(line: str) -> list[str]:
    return line.partition(": ")[2].split(", ")


def test_no_density_is_printed_of_a_module_that_runs_in_pytorch(capsys: pytest.CaptureFixture[str]) -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand(()) + 1 > 0 else -x

    with pytest.warns(UserWarning, match="runs in PyTorch"):
        ORTModule(Asks(), statistics="input_density", pieces=False)(torch.ones(3, requires_grad=True))
    assert not capsys.readouterr().out
