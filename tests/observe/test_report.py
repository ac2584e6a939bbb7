"""onnxtrain report: the contents of the page, and its rendering in a browser."""

from __future__ import annotations

import html.parser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onnxtrain.cli import main
from onnxtrain.cli.model import load_model
from onnxtrain.cli.report import measure
from onnxtrain.observe.model_report.page import render
from onnxtrain.observe.model_report.values import ModelReport

MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x, scale):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.dropout(x) * scale.detach() + 2 * torch.ones(8)

def less_than():
    return Net(), {"x": torch.randn(4, 8), "scale": torch.ones(())}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ModelReport:
    file = tmp_path_factory.mktemp("report") / "net.py"
    file.write_text(MODEL)
    return measure(load_model(f"{file}:less_than"), steps=2)


def test_the_values_are_those_of_the_model(report: ModelReport) -> None:
    assert report.is_right
    assert report.captured.count("Linear") == report.executed.count("Linear") == 3
    assert report.executed.count("TanhGrad") == 3
    assert any(node.is_backward for node in report.executed.nodes)
    assert not any(node.is_backward for node in report.captured.nodes)
    assert {module for module, _ in report.captured.by_module()} >= {"layers.0", "layers.1", "layers.2", "dropout"}
    assert all(node.line.startswith("net.py:") for node in report.captured.nodes if node.op in ("Linear", "Tanh"))
    assert len(report.eager.ms) == len(report.ours.ms) == 2
    times = {name: count for name, _, count in report.time_by_op()}
    assert times["Linear"] == 3
    assert {name: count for name, _, count in report.time_by_module()}["layers.*"] >= 3
    assert report.compiled.before is not None
    assert report.compiled.after is not None
    assert report.passes()
    assert "<svg" in report.memory
    assert re.search(r"net\.py:\d+ in forward</code>", report.memory)  # the largest tensors, with the user's line


class Loaded(html.parser.HTMLParser):
    """Collects the external resources of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [v or "" for k, v in attributes if k in ("src", "href") and not (v or "").startswith("#")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_is_complete_and_loads_nothing(report: ModelReport) -> None:
    page = render(report)
    parser = Loaded()
    parser.feed(page)
    assert not parser.addresses
    assert "@import" not in page
    assert "url(" not in page
    text = " ".join(parser.words)
    for stage, each in report.passes():
        assert each.name in text, stage
    for word in ("TanhGrad", "layers.1", "net.py:", report.verdict.split()[0], "prefers-color-scheme: dark"):
        assert word in text or word in page


def test_names_are_escaped(report: ModelReport) -> None:
    object.__setattr__(report, "name", "<script>alert(1)</script>")
    assert "<script>alert(1)" not in render(report)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium here")
def test_a_browser_shows_and_searches_it(report: ModelReport, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    ask = '<script>find.value = "tanh layers"; search(); buttons[0].click();</script></body>'
    file.write_text(render(report).replace("</body>", ask))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=200, check=True
    ).stdout
    expected = sum(
        "tanh" in f"{n.module} {n.op} {n.outputs}".lower() and "layers" in n.module for n in report.captured.nodes
    )
    match = re.search(r'id="found"[^>]*>(\d+) nodes', shown)
    assert match is not None
    assert int(match[1]) == expected


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: ModelReport) -> None:
    monkeypatch.setattr("onnxtrain.cli.report.measure", lambda loaded, steps: report)
    (tmp_path / "net.py").write_text(MODEL)
    assert main(["report", f"{tmp_path}/net.py:less_than", "--html", f"{tmp_path}/page.html"]) == 0
    assert "<!doctype html>" in (tmp_path / "page.html").read_text()
