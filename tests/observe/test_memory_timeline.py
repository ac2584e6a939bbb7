"""The memory of a step: predicted, measured and drawn, and the command that prints it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.cli import main
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.observe import allocations
from onnxtrain.observe.allocations import peak_bytes, profiled, record
from onnxtrain.observe.memory_timeline import BANDS, Interval, MemoryTimeline, as_bytes, draw, held_by_band
from onnxtrain.observe.step_memory import measure_step, predicted
from tests.limits import WAIT_LIMIT_S

MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block() for _ in range(3)]), torch.randn(64, 32)

def nothing():
    return torch.nn.Identity(), torch.randn(2)
"""
MIB = 2**20


def timeline(*totals: int) -> MemoryTimeline:
    held = [held_by_band({"activations kept": total}) for total in totals]
    return MemoryTimeline("a step", "nodes", tuple(Interval(i, i + 1, h, f"node {i}") for i, h in enumerate(held)))


def test_allocated_and_freed_memory_is_counted() -> None:
    def run() -> torch.Tensor:
        kept = torch.ones(1000)
        (torch.ones(3000) + 1).sum()
        return kept

    results: list[torch.Tensor] = []
    recording = record(lambda: results.append(run()))
    assert 28_000 <= peak_bytes(recording.allocations) <= 28_100  # sum takes some bytes of its own
    (left,) = [one for one in recording.allocations if one.end is None]
    assert (left.bytes, left.address) == (4000, results[0].data_ptr())
    assert left.allocated_by == "aten::empty"
    freed = record(results.clear)
    assert [(one.bytes, one.start) for one in freed.allocations] == [(4000, None)]


def test_the_profilers_notes_of_itself_are_dropped_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with profiled():
        os.write(2, b"USDT: by the user\n")
    with allocations._without_notes():
        os.write(2, b"USDT:2026 profiler_start\nan error\n")
    assert capfd.readouterr().err == "USDT: by the user\nan error\n"
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("early", [False, True])
def test_gradients_are_held_until_a_planned_step_ends(early: bool) -> None:
    """Gradients released earlier are then held by .grad."""
    module = nn.Sequential(*[nn.Linear(100, 100) for _ in range(4)])
    model = ORTModule(module, early_gradients=early)
    model(torch.ones(5, 100)).sum().backward()
    drawn = predicted("", *engine_of(model).newest().timeline(), {})
    gradients = [dict(zip(BANDS, interval.bytes_by_band, strict=True))["gradients"] for interval in drawn.intervals]
    assert gradients == sorted(gradients)
    assert gradients[-1] == sum(p.nbytes for p in module.parameters())


def test_a_measured_step_is_split_into_bands() -> None:
    module = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 100))
    x, parameters = torch.ones(50, 100), 4 * (2 * 100 * 200 + 300)
    step = measure_step("", module, torch.optim.Adam(module.parameters()), lambda: module(x), torch.sum)
    end = dict(zip(BANDS, step.timeline.intervals[-1].bytes_by_band, strict=True))
    assert step.state["parameters"] == parameters
    assert 2 * parameters <= step.state["optimizer state"] <= 2 * parameters + 100
    assert end["gradients"] == parameters
    assert end["activations kept"] == 0
    assert [name for name, _ in step.timeline.phases] == ["forward", "backward", "optimizer"]
    backward = step.timeline.phases[1][1]
    (before,) = [s for s in step.timeline.intervals if s.start <= backward < s.end]
    kept = 4 * (50 * 200 + 50 * 100) + 4  # tanh's result, the output and the loss
    assert dict(zip(BANDS, before.bytes_by_band, strict=True))["activations kept"] == kept
    assert step.activations >= kept


def test_a_chart_shows_the_peak_and_the_memory_of_each_interval() -> None:
    svg = draw(timeline(MIB, 7 * MIB, 2 * MIB))
    root = ET.fromstring(svg)
    texts = [element.text for element in root.iter() if element.tag == "text"]
    assert "peak 7.0 MiB" in texts
    titles = [element.text or "" for element in root.iter() if element.tag == "title"]
    assert titles[1].splitlines() == ["7.0 MiB in all", "7.0 MiB activations kept", "node 1"]


def test_a_long_step_is_drawn_with_its_peak() -> None:
    svg = draw(timeline(*[MIB + (position == 1234) * MIB for position in range(5000)]))
    assert "peak 2.0 MiB" in svg
    assert "node 1234" in svg
    assert len(svg) < 300_000


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (100 * MIB, "100 MiB"), (5 * 2**40, "5,120 GiB")],
)
def test_formatted_bytes(count: int, text: str) -> None:
    assert as_bytes(count) == text


# The command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "net.py"
    file.write_text(MODEL)
    return file


def test_the_commands_prediction_equals_its_measurement(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("ONNXTRAIN_RNG", "torch")
    page = tmp_path / "memory.html"
    assert main(["memory", f"{model}:build", "--html", str(page), "--subgraphs"]) == 0
    out = capsys.readouterr().out
    kibibytes = {name: float(n) for name, n in re.findall(r"│ ([\w ,]+?) +│ +([\d.]+) KiB", out)}
    assert kibibytes["onnxtrain, predicted"] == pytest.approx(kibibytes["onnxtrain, measured"], rel=0.1)
    assert kibibytes["onnxtrain, measured"] <= kibibytes["eager PyTorch, measured"]
    assert re.search(r"3 │ float32 64×128 +│ Gelu", out)  # one row for three layers
    assert "net.py:10 in forward" in out
    assert re.search(r"96.0 KiB │ +3 │ 3 of 3 recomputed +│ Gelu\+:1:-1", out)
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "http" not in text.replace("http://www.w3.org", "")  # nothing is fetched
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)


def test_the_command_plans_for_a_budget(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("ONNXTRAIN_RNG", "torch")
    assert main(["memory", f"{model}:build", "--budget", "0.8"]) == 0
    out = capsys.readouterr().out
    kibibytes = {name: float(n) for name, n in re.findall(r"│ ([\w ,]+?) +│ +([\d.]+) KiB", out)}
    assert kibibytes["onnxtrain, predicted"] < kibibytes["onnxtrain without recomputation, predicted"]
    assert "recomputed" in out


def test_a_model_without_parameters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", f"{model}:nothing"]) == 2
    assert "no trainable parameters" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_is_drawn_by_a_browser(tmp_path: Path) -> None:
    from onnxtrain.observe.memory_page import Chart, render

    page = tmp_path / "page.html"
    page.write_text(render("a title", "", [], [Chart(timeline(MIB, 3 * MIB), "")], []))
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", profile, "--dump-dom", page.as_uri()]
    writable_home = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=writable_home, capture_output=True, text=True, timeout=WAIT_LIMIT_S, check=True)
    assert "peak 3.0 MiB" in done.stdout
    assert done.stdout.count("<polygon") == 1
