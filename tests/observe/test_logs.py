"""The log: levels, ranks, the report of the initialization; nothing is set up by default."""

from __future__ import annotations

import io
import logging
import os
import pdb
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from onnxtrain import DebugOptions, LogLevel, Options, ORTModule
from onnxtrain.observe import logs
from onnxtrain.observe.logs import DEVINFO
from onnxtrain.system import ranks
from onnxtrain.system.cache_folder import VARIABLE, cache_folder

LOG = logging.getLogger("onnxtrain")


@pytest.fixture(autouse=True)
def keeps_its_level() -> Iterator[None]:
    before = LOG.level
    yield
    LOG.setLevel(before)
    LOG.removeHandler(logs._CONSOLE)


def test_a_command_leaves_the_level_as_it_was() -> None:
    before = LOG.level
    with logs.only_errors():
        assert LOG.level == logging.ERROR
    assert LOG.level == before


def train(model: torch.nn.Module, batch: int = 3) -> None:
    model(torch.ones(batch, 4)).sum().backward()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def test_info_lists_recomputed_values_with_shapes_and_bytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    layers = (torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    train(ORTModule(torch.nn.Sequential(*layers)), batch=128)
    assert "Sequential: recompute: 2 values" in caplog.text
    assert "Sequential: recompute: 2 x Gelu float[128, 64], 32,768 bytes each" in caplog.text


def test_info_lists_the_work_skipped_in_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    class Classifies(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(9, 4, padding_idx=0), torch.nn.Linear(4, 9)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())

    caplog.set_level(logging.INFO, "onnxtrain")
    ids = torch.tensor([[1, 2, 0, 0]])
    ORTModule(Classifies())(ids, torch.tensor([[3, -100, -100, -100]])).backward()
    assert "Classifies: 50.0% of 4 tokens are real in ids" in caplog.text
    assert "Classifies: 25.0% of 4 labels count in labels" in caplog.text
    assert caplog.text.count("Classifies: pack_tokens did not change embedding: no matmul runs on its tokens") == 1


# Levels and ranks


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (LogLevel.VERBOSE, logging.DEBUG),
        (LogLevel.DEVINFO, DEVINFO),
        (LogLevel.INFO, logging.INFO),
        (LogLevel.ERROR, logging.ERROR),
        (LogLevel.FATAL, logging.CRITICAL),
    ],
)
def test_the_level_is_the_loggers(level: LogLevel, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ORTModule(net(), DebugOptions(level))
    assert LOG.getEffectiveLevel() == expected
    assert logging.getLogger("onnxtrain.stages").getEffectiveLevel() == expected
    ORTModule(net())  # the default says nothing
    assert LOG.getEffectiveLevel() == expected


@pytest.mark.parametrize("level", LogLevel)
def test_other_ranks_log_below_info_only(level: LogLevel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (ranks.rank(), ranks.world_size()) == (3, 8)
    logs.set_up(Options(log_level=level))
    assert LOG.isEnabledFor(logging.CRITICAL) is (level < LogLevel.INFO)


def test_a_single_process_is_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "", "x"):
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False) if text is None else monkeypatch.setenv(name, text)
        assert (ranks.rank(), ranks.world_size()) == (0, 1)


# The report of the initialisation


def reports(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [r for r in caplog.records if r.name == "onnxtrain" and "took" in r.getMessage()]


def test_one_line_for_the_first_graph_and_one_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxtrain")
    model = ORTModule(net())
    train(model)
    train(model, 5)
    (line,) = reports(caplog)
    assert line.levelno == logging.INFO
    match = re.fullmatch(r"Sequential: initialisation took ([\d.]+) s, of which capture ([\d.]+) s", line.getMessage())
    assert match
    assert 0 < float(match[2]) <= float(match[1])
    caplog.clear()
    with torch.no_grad():
        model(torch.ones(3, 4))
    (line,) = reports(caplog)
    assert line.levelno == logging.INFO
    assert line.getMessage().startswith("Sequential: a further graph took")


def test_below_info_every_stage_and_pass_has_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(DEVINFO, "onnxtrain")
    model = ORTModule(net())
    train(model)
    (text,) = [r.getMessage() for r in caplog.records if r.levelno == DEVINFO]
    for stage in model.report().stages:
        assert f"  {stage.name} " in text
        assert stage.took_ms >= sum(each.took_ms for each in stage.passes)
    named = [each.name for stage in model.report().stages for each in stage.passes]
    assert {"fold_constants", "eliminate_common_subexpressions", "eliminate_dead_code"} <= set(named)
    assert all(f"    {name} " in text for name in named)


# The streams


BERT = """
import os, sys, torch, warnings
from onnxtrain import ORTModule
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
def train():
    model = ORTModule(BertForSequenceClassification(config))
    ids = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=torch.tensor([0, 1])).loss.backward()
train()
class Checked(torch.nn.Module):  # in pieces, with a graph break at item()
    def forward(self, x):
        count = (x > 0).sum().item()
        torch._check(count > 3)
        return x * count
with warnings.catch_warnings(record=True) as caught:
    ORTModule(Checked())(torch.ones(5, requires_grad=True))
assert "in pieces" in str(caught[0].message)
print("asks for more", file=sys.stderr)
os.environ["ORTMODULE_LOG_LEVEL"] = "INFO"
train()
"""


@pytest.mark.slow  # test_process.py asks the same of a smaller module
@pytest.mark.compiler  # without one, a warning says so
def test_training_logs_nothing_by_default_and_the_report_at_info() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORTMODULE_LOG_LEVEL"} | {
        "OMP_NUM_THREADS": "1",
        VARIABLE: str(cache_folder("native").parent),  # a home that cannot be written is warned of
    }
    done = subprocess.run([sys.executable, "-c", BERT], env=environment, capture_output=True, text=True, check=True)
    usual, at_info = done.stderr.split("asks for more\n")
    assert (done.stdout, usual) == ("", "")
    assert "INFO onnxtrain: BertForSequenceClassification: initialisation took" in at_info


def emitted(monkeypatch: pytest.MonkeyPatch, handlers: list[logging.Handler], level: int = logging.WARNING) -> None:
    """Log one message with an explicit level in a program that has set up these handlers."""
    logs.set_up(Options(log_level=LogLevel.DEVINFO))
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    LOG.log(level, "a %s", "message")


def test_messages_go_to_the_error_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    emitted(monkeypatch, [])
    assert capsys.readouterr() == ("", "WARNING onnxtrain: a message\n")
    emitted(monkeypatch, [], DEVINFO)
    assert capsys.readouterr() == ("", "DEVINFO onnxtrain: a message\n")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    emitted(monkeypatch, [])
    assert capsys.readouterr() == ("", "[rank 1] WARNING onnxtrain: a message\n")


def test_without_the_option_the_log_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.setLevel(logging.NOTSET)
    logs.set_up(Options())
    assert (LOG.handlers, LOG.level, LOG.filters, LOG.propagate) == ([], logging.NOTSET, [], True)
    assert logging.getLevelName(DEVINFO) == f"Level {DEVINFO}"
    LOG.setLevel(logging.INFO)
    monkeypatch.setenv("RANK", "1")
    logs.set_up(Options())
    assert LOG.level == logging.INFO, "the program's own"


def test_handlers_of_the_program_take_precedence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted(monkeypatch, [logging.StreamHandler(sys.stdout)])
    assert capsys.readouterr() == ("a message\n", "")


@pytest.mark.slow
def test_a_debugger_in_forward_can_use_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            breakpoint()
            return y + 1

    def debug() -> None:  # pdb.set_trace, which pytest replaces
        pdb.Pdb(stdin=sys.stdin, stdout=sys.stdout).set_trace(sys._getframe(1))

    monkeypatch.setattr(sys, "stdin", io.StringIO("p 'seen', tuple(y.shape)\nc\n" * 2))
    monkeypatch.setattr(sys, "breakpointhook", debug)
    y = ORTModule(Net())(torch.ones(3))
    out = capfd.readouterr().out
    assert "('seen', (3,))" in out
    assert y.sum().item() == 9


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors by /proc")
@pytest.mark.parametrize("level", [LogLevel.VERBOSE, LogLevel.WARNING])
def test_no_file_descriptor_leaks(level: LogLevel, tmp_path: Path) -> None:
    def held() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    counts = []
    for number in range(3):
        model = ORTModule(net(), DebugOptions(level, save_onnx=True, onnx_prefix=f"n{number}", save_path=tmp_path))
        train(model)
        counts.append(held())
    assert counts[0] == counts[1] == counts[2]
