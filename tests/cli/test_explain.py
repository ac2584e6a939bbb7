"""`onnxtrain explain`, and its counts of FLOPs and bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule, cli
from onnxtrain.report import Work

SOURCE = """
import torch

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 16)
        self.score = torch.nn.Linear(16, 5)

    def forward(self, words, labels):
        logits = self.score(self.embed(words))
        loss = torch.nn.functional.cross_entropy(logits.view(-1, 5), labels.view(-1))
        return {"loss": loss, "logits": logits}

class Asks(torch.nn.Module):
    def forward(self, x):
        return x if torch.rand(()) + 1 > 0 else -x

def words():
    labels = torch.full((4, 8), -100)
    labels[:, 0] = 1
    return Words(), (torch.arange(32).view(4, 8) % 20, labels)

class Summed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.head = (torch.nn.Linear(16, 64) for _ in range(3))

    def forward(self, x):
        return self.head.weight.sum() + (torch.nn.functional.silu(self.gate(x)) + self.up(x)).mean()

def summed():
    return Summed(), torch.ones(512, 16)

def pictures():
    layers = [layer for _ in range(4) for layer in (torch.nn.Conv2d(16, 16, 3), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(4, 16, 12, 12)

def asks():
    return Asks(), torch.ones(3, requires_grad=True)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models_to_explain.py"
    path.write_text(SOURCE)
    return path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_work_is_counted_at_the_sizes_of_the_call() -> None:
    """Forward has one GEMM of 2 * 5 * 3 * 4 FLOPs; backward has one for the weight, and the sum for the bias."""
    model = ORTModule(nn.Linear(3, 4), statistics="work")
    model(torch.ones(5, 3))
    report = model.report()
    capture = next(stage for stage in report.stages if stage.name == "capture")
    assert capture.work == Work(2 * 5 * 3 * 4, 4 * (5 * 3 + 4 * 3 + 4 + 5 * 4))
    assert report.after is not None
    assert report.after.flops == 2 * (2 * 5 * 3 * 4) + 5 * 4
    assert report.before == report.after  # no pass finds anything


def test_work_is_not_counted_unless_asked_for() -> None:
    model = ORTModule(nn.Linear(3, 4))
    model(torch.ones(5, 3))
    assert model.report().before is None
    assert model.report().after is None


def test_views_are_free() -> None:
    class Turned(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, 1).unsqueeze(0)

    model = ORTModule(Turned(), statistics="work")
    model(torch.ones(5, 3, requires_grad=True))
    assert model.report().after == Work(0, 0)


def test_skipped_work_is_not_counted(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """4 of 32 tokens have a label; their number depends on the data."""
    all_outputs = explained(capsys, f"{file}:words")
    assert "refused  cross_entropy_loss: stops at Linear 'linear' of score: " in all_outputs
    assert "keep_outputs can name those that are used" in all_outputs
    assert "models_to_explain.py:12 in forward" in all_outputs  # the user's line
    assert re.search(r"^as captured: \d+\.\d kFLOP, \d+\.\d KiB read and written$", all_outputs, re.MULTILINE)
    only_loss = explained(capsys, f"{file}:words", "--keep-outputs", "loss")
    assert "skip tokens with ignored labels" in only_loss
    assert "after all passes" in only_loss
    assert shares(only_loss, "after all passes")[0] < 30 < shares(all_outputs, "after all passes")[0]


def shares(text: str, line: str) -> tuple[int, int]:
    """The remaining percentages of FLOPs and bytes."""
    (summary,) = [each for each in text.splitlines() if each.startswith(line)]
    flops, moved = summary.rpartition("(")[2].rstrip(")").split(" and ")
    return int(flops.rstrip("%")), int(moved.rstrip("%"))


def test_a_folder_shows_the_graph_without_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "intermediate_size": 16, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = explained(capsys, str(tmp_path), "--batch", "16", "--length", "64", "--keep-outputs", "loss")
    assert shares(text, "without padding")[0] < shares(text, "after all passes")[0]
    assert "BertForMaskedLM, without padding" in text


def test_fused_regions_are_listed_with_the_nodes_outside_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forward, backward = explained(capsys, f"{file}:summed").split("fused regions (forward)")[1].split("(backward)")
    assert re.search(r"region +QuickGelu \+ Add.* over \[s\d+, 64\]: by kernels=fused and fused-all\n", forward)
    assert re.search(r"refused +ReduceSum: no adjacent node has the same iteration shape", forward)
    assert "QuickGeluGrad" in backward
    text = explained(capsys, f"{file}:pictures")
    assert text.count("its image tensors are channels_last, and a region's kernel takes contiguous tensors only") == 2


def test_the_reason_why_there_is_no_graph_is_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{file}:asks"]) == cli.FAILED
    assert "models_to_explain.py" in capsys.readouterr().err
