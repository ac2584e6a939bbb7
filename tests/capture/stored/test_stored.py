"""Captures on disk: what makes one serve again, and everything that must not."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import errno
import functools
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

import onnxtrain
import onnxtrain.frontend.engine
from onnxtrain import ORTModule, log
from onnxtrain.capture.key import executed_code, fingerprint
from onnxtrain.capture.stored import cache, folder
from onnxtrain.capture.stored.containers import output_from_json, output_to_json
from onnxtrain.capture.structure import flatten_output
from onnxtrain.testing import assert_no_worse_than_eager

SCALE = 1.1
TABLE = torch.ones(2)


def helper(x: torch.Tensor, power: int = 2) -> torch.Tensor:
    return x.pow(power)


@dataclasses.dataclass
class Settings:
    slope: float = 0.1
    names: list[str] = dataclasses.field(default_factory=lambda: ["a"])


class Net(nn.Module):
    offset = 0.5

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, hidden), nn.Linear(hidden, 2)
        self.settings = Settings()
        self.activation: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(nn.functional.leaky_relu(self.first(x), self.settings.slope))

    def forward(self, x: torch.Tensor, *, double: bool = False) -> SequenceClassifierOutput:
        y = self.second(self.inner(x)) * SCALE + self.offset + len(self.settings.names)
        y = helper(y * 2 if double else y)
        if x.shape[0] > 5:
            y = y + 1
        return SequenceClassifierOutput(loss=y.sum(), logits=y)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each capture that is made and not read."""
    made: list[int] = []
    original = onnxtrain.frontend.engine.capture

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(onnxtrain.frontend.engine, "capture", counting)
    return made


@pytest.fixture(autouse=True)
def notices_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())


def model(tmp_path: Path, make: Callable[[], nn.Module] = Net, **options: Any) -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(make(), rng="torch", kernels="pytorch", cache_dir=tmp_path / "captures", **options)


def values(module: nn.Module, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
    """The logits, and the gradient of each parameter that has one."""
    output = module(x, **kwargs)
    found = {"logits": output.logits}
    if output.loss.requires_grad:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        found |= dict(zip(named, torch.autograd.grad(output.loss, list(named.values())), strict=True))
    return found


def step(ort: ORTModule, x: torch.Tensor | None = None, **kwargs: Any) -> None:
    """One step, which gives eager's numbers."""
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=next(ort.parameters()).dtype) if x is None else x
    got, eager = values(ort, x, **kwargs), values(ort.module, x, **kwargs)
    with torch.autocast("cpu", enabled=False):
        exact = values(copy.deepcopy(ort.module).double(), x.double(), **kwargs)
    assert got.keys() == exact.keys()
    for name in exact:
        assert_no_worse_than_eager(name, got[name], eager[name], exact[name])


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "captures").glob("*.capture"))


@pytest.mark.everywhere
def test_a_second_module_takes_the_capture_from_disk(tmp_path: Path, captures: list[int]) -> None:
    step(model(tmp_path))
    assert len(files(tmp_path)) == len(captures) == 1
    assert (tmp_path / "captures").stat().st_mode & 0o777 == 0o700
    again = model(tmp_path)
    step(again)
    assert len(captures) == 1
    for rows in (1, 2, 5):  # sizes stay open, and what the first capture did not prove is captured
        step(again, torch.randn(rows, 4))
    step(again, torch.randn(9, 4))  # a decision on sizes: another graph
    assert not len(captures) > 3


class ReturnsChanged(nn.Module):
    """Returns views of an input that it changes in place, and the sum, which the option keep_outputs may drop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.neg_()
        return (x * self.weight).sum(), x, x[1:, ::2]


@pytest.mark.parametrize("kept", [None, ("1", "2")])
def test_views_of_a_changed_input_come_back(kept: tuple[str, ...] | None, tmp_path: Path, captures: list[int]) -> None:
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        _, whole, part = model(tmp_path, ReturnsChanged, keep_outputs=kept)(x)
        assert whole is x
        x.zero_()
        assert part.shape == (rows - 1, 2)
        assert not part.any()
    assert len(captures) == 1


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """Makes a network that differs."""

    def make() -> nn.Module:
        net = Net()
        change(net)
        return net

    return make


def other_inner(self: Net, x: torch.Tensor) -> torch.Tensor:
    return self.activation(nn.functional.leaky_relu(self.first(x), self.settings.slope)) * 3


def wrapped(function: Callable[..., Any], factor: float) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * factor

    return call


class Other(Net):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) - 1


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "a width": lambda patch: lambda: Net(hidden=8),
    "a class": lambda patch: Other,
    "a parameter's dtype": lambda patch: lambda: Net().double(),
    "a parameter that is frozen": lambda patch: changed(lambda net: net.first.weight.requires_grad_(False)),
    "a parameter that is tied": lambda patch: changed(lambda net: setattr(net.first, "bias", None)),
    "a number in an object": lambda patch: changed(lambda net: setattr(net.settings, "slope", 0.2)),
    "a container in an object": lambda patch: changed(lambda net: net.settings.names.append("b")),
    "an attribute over a class's": lambda patch: changed(lambda net: setattr(net, "offset", 0.75)),
    "a function in an attribute": lambda patch: changed(lambda net: setattr(net, "activation", torch.sigmoid)),
    "a lambda in an attribute": lambda patch: changed(lambda net: setattr(net, "activation", lambda x: x * 2)),
    "evaluation": lambda patch: changed(lambda net: net.eval()),
    "a constant of a class": lambda patch: patch.setattr(Net, "offset", 0.25),
    "a method": lambda patch: patch.setattr(Net, "inner", other_inner),
    "a wrapped method": lambda patch: patch.setattr(Net, "inner", wrapped(Net.inner, 2.0)),
    "forward of a library's layer": lambda patch: patch.setattr(
        nn.Linear, "forward", lambda self, x: nn.functional.linear(x, self.weight, self.bias) * 2
    ),
    "a function of a library": lambda patch: patch.setattr(nn.functional, "leaky_relu", lambda x, slope: x * slope),
    "a global constant": lambda patch: patch.setattr(sys.modules[__name__], "SCALE", 1.2),
    "a global function": lambda patch: patch.setattr(sys.modules[__name__], "helper", lambda x: x * 3),
    "a default": lambda patch: patch.setattr(helper, "__defaults__", (3,)),
    "a source file": lambda patch: patch.setattr(cache, "file_hash", lambda file: f"another {file}"),
    "a version": lambda patch: patch.setattr(cache, "versions", lambda: ("another",)),
    "a device": lambda patch: patch.setattr(cache, "_devices", lambda: ["another"]),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_what_changes_makes_another_capture(
    what: str, tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step(model(tmp_path))
    step(model(tmp_path))
    assert len(captures) == 1
    make = CHANGES[what](monkeypatch) or Net
    step(model(tmp_path, make))
    assert len(captures) == 2


def at_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "other attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "a default dtype": contextlib.contextmanager(at_float64),
}


@pytest.mark.parametrize("what", list(SURROUNDINGS))
def test_the_surroundings_count(what: str, tmp_path: Path, captures: list[int]) -> None:
    x = torch.randn(3, 4)
    step(model(tmp_path), x)
    net = Net()
    with SURROUNDINGS[what]():
        for _ in range(2):
            ort = ORTModule(net, rng="torch", kernels="pytorch", cache_dir=tmp_path / "captures")
            ort(x)
    assert len(captures) == 2


def test_versions_change_with_the_sources_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version stays the same from one change to the next."""
    source = tmp_path / "inner" / "module.py"
    source.parent.mkdir()
    monkeypatch.setattr(onnxtrain, "__file__", str(tmp_path / "__init__.py"))
    found = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        found.append(fingerprint.versions.__wrapped__())
    assert found[0] == found[2] != found[1]


def test_the_call_counts(tmp_path: Path, captures: list[int]) -> None:
    step(model(tmp_path))
    step(model(tmp_path), double=True)
    step(model(tmp_path), torch.randn(3, 4).requires_grad_())
    step(model(tmp_path), torch.randn(4, 3).T)
    assert len(captures) == 4
    step(model(tmp_path), double=True)
    assert len(captures) == 4


# What is not kept


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class ReadsGlobalTensor(Net):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) * TABLE[0]


class ReadsVariable(Net):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) * (2 if os.environ.get("ONNXTRAIN_TEST_TWICE") else 1)


class CallsFunction(Net):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(super().inner(x))  # type: ignore[no-any-return]


class HasTable(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tables = [torch.ones(6)]

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) * self.tables[0]


def from_text() -> nn.Module:
    scope: dict[str, Any] = {"Net": Net}
    exec("class FromText(Net):\n    def inner(self, x): return super(FromText, self).inner(x) * 2", scope)
    scope["FromText"].inner.__globals__["FromText"] = scope["FromText"]
    made: nn.Module = scope["FromText"]()
    return made


NOT_KEPT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a custom autograd function": (CallsFunction, "Python function"),
    "a global tensor": (ReadsGlobalTensor, "the global TABLE"),
    "a list of tensors": (HasTable, "Tensor"),
    "a variable": (ReadsVariable, "environ"),
    "code in no file": (from_text, "not in a (module|file)"),
}


@pytest.mark.parametrize("what", list(NOT_KEPT))
def test_what_only_this_process_has_is_not_kept(
    what: str, tmp_path: Path, captures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = NOT_KEPT[what]
    caplog.set_level(logging.INFO, "onnxtrain")
    ort = model(tmp_path, make)
    step(ort)
    step(ort, torch.randn(9, 4))
    said = [r.message for r in caplog.records if "not kept on disk" in r.message]
    assert len(said) == 1
    assert re.search(reason, said[0])
    assert not files(tmp_path)
    step(model(tmp_path, make))
    assert len(captures) == 3


def test_a_file_that_changed_since_the_process_began_is_not_what_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executed_code, "_process_start", lambda: 0.0)
    step(model(tmp_path))
    assert not files(tmp_path)


class Collections:
    """A callback of the garbage collector that is no function."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        count_collection(phase, info)


COLLECTIONS = [0]


def count_collection(phase: str, info: dict[str, int]) -> None:
    COLLECTIONS[0] += 1


@pytest.mark.parametrize("callback", [count_collection, Collections()], ids=["function", "object"])
def test_callbacks_of_the_garbage_collector_are_no_part_of_forward(
    callback: Callable[..., None], tmp_path: Path, captures: list[int]
) -> None:
    before, thresholds = COLLECTIONS[0], gc.get_threshold()
    gc.callbacks.append(callback)
    try:
        gc.set_threshold(1)
        step(model(tmp_path))
        assert COLLECTIONS[0] > before
        step(model(tmp_path))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(callback)
    assert len(captures) == 1


def test_under_a_profiler_nothing_is_kept_and_it_goes_on(tmp_path: Path) -> None:
    seen: list[str] = []
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        step(model(tmp_path))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert seen
    assert not files(tmp_path)


# The folder


def damage(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "cut off":
        file.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "other bytes":
        file.write_bytes(data.replace(b"leaky_relu", b"leaky_rely"))
    else:
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, part.replace(b'"form": 2', b'"form": 0') if how == "other form" else b"{")


@pytest.mark.parametrize("how", ["cut off", "empty", "other bytes", "other form", "no JSON"])
def test_a_damaged_file_is_said_once_and_made_anew(
    how: str, tmp_path: Path, captures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    step(model(tmp_path))
    (file,) = files(tmp_path)
    damage(file, how)
    caplog.set_level(logging.WARNING, "onnxtrain")
    for _ in range(2):
        step(model(tmp_path))
    assert len(captures) == 2  # the file is whole again
    assert sum("is damaged" in r.message for r in caplog.records) == 1


@pytest.mark.everywhere
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_where_nothing_can_be_written_training_goes_on(
    number: int, tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(file: Path) -> Any:
        raise OSError(number, os.strerror(number), str(file))

    monkeypatch.setattr(folder, "replacing", failing)
    caplog.set_level(logging.WARNING, "onnxtrain")
    for _ in range(2):
        step(model(tmp_path))
    assert len(captures) == 2
    assert sum(os.strerror(number) in r.message for r in caplog.records) == 1


def test_a_folder_that_is_a_file_is_no_end(tmp_path: Path, captures: list[int]) -> None:
    (tmp_path / "captures").write_text("")
    step(model(tmp_path))
    assert len(captures) == 1


def test_a_strangers_file_is_not_read(tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    step(model(tmp_path))
    (file,) = files(tmp_path)
    monkeypatch.setattr(folder, "_is_ours", lambda found: found != file)
    step(model(tmp_path))
    assert len(captures) == 2


def test_the_least_recently_used_go(tmp_path: Path) -> None:
    kept = folder.CaptureFolder(tmp_path, 250)
    first, second = (kept.add(key, key.encode() * 100) for key in "ab")
    assert first is not None
    assert second is not None
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    abandoned, young = tmp_path / ".c-1.capture.aa.partial", tmp_path / ".c-2.capture.bb.partial"
    for file in (abandoned, young):
        file.write_bytes(b"x")
    os.utime(abandoned, (1, 1))
    kept.used(first)
    third = kept.add("c", b"c" * 100)
    assert {*tmp_path.iterdir()} == {first, third, young}
    kept.add("d", b"d" * 1000)  # larger than all there is room for: it is kept, alone
    assert [file.name[0] for file in tmp_path.glob("*.capture")] == ["d"]


def test_names_that_an_entry_may_not_have(tmp_path: Path) -> None:
    for name in ("subprocess:Popen", "os:system", "builtins:object", "nowhere:Class", "collections:OrderedDict.x"):
        with pytest.raises(ValueError, match=r"no (class|container)"):
            output_from_json({"names": [], "tree": ["node", name, ["tuple"], [], []]})


Pair = collections.namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2),
        [torch.ones(2), (torch.ones(1), None, True, -0.0, 3, "text")],
        {"a": torch.ones(2), 1: {"b": torch.zeros(1)}},
        Pair(torch.ones(1), torch.float16),
        SequenceClassifierOutput(loss=torch.ones(()), hidden_states=(torch.ones(1),)),
        torch.ones(2, 2).max(dim=0),
        collections.OrderedDict(z=torch.ones(1), a=torch.ones(1)),
    ],
    ids=lambda output: type(output).__name__,
)
def test_structures_come_back(output: Any) -> None:
    leaves, structure = flatten_output(output)
    again = output_from_json(json.loads(json.dumps(output_to_json(structure))))
    assert again == structure
    assert again.names == structure.names
    made = again.unflatten(leaves, ())
    assert type(made) is type(output)
    assert repr(made) == repr(output)


# Processes


SCRIPT = """
    import sys, torch, onnxtrain.frontend.engine
    from onnxtrain import ORTModule

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x) * FACTOR

    torch.manual_seed(0)
    made = []
    original = onnxtrain.frontend.engine.capture
    onnxtrain.frontend.engine.capture = lambda *args, **kwargs: made.append(1) or original(*args, **kwargs)
    net = Net()
    ort = ORTModule(net, kernels="pytorch", cache_dir=sys.argv[1])
    x = torch.randn(3, 4)
    assert torch.equal(ort(x), net(x))
    print(len(made))
"""


def run(script: Path, captures_in: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), str(captures_in)]
    environment = {**os.environ, "PYTHONPATH": str(Path(onnxtrain.__file__).parents[1])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_processes_share_captures_until_the_source_changes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("FACTOR", "2"))
    time.sleep(0.1)
    at_once = [run(script, tmp_path / "captures") for _ in range(2)]
    assert all(process.communicate()[0].strip() in ("0", "1") for process in at_once)
    assert len(files(tmp_path)) == 1  # of the same bytes
    assert run(script, tmp_path / "captures").communicate()[0].strip() == "0"
    script.write_text(textwrap.dedent(SCRIPT).replace("FACTOR", "3"))
    assert run(script, tmp_path / "captures").communicate()[0].strip() == "1"


KILL = {
    "while the bytes are written": "os.fsync = kill",
    "before the file has its name": "os.replace = kill",
    "before the name reaches the disk": "onnxtrain.system.atomic_file._sync_folder = kill",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILL)
def test_a_process_that_is_killed_while_it_writes_spoils_nothing(moment: str, tmp_path: Path) -> None:
    source = textwrap.dedent(SCRIPT).replace("FACTOR", "2")
    script, killed = tmp_path / "script.py", tmp_path / "killed.py"
    script.write_text(source)
    kill = "import os, signal, onnxtrain.system.atomic_file\ndef kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    # It writes the entry of the other script: the path of a script is no part of what is kept.
    killed.write_text(f"{kill}{KILL[moment]}\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    time.sleep(0.1)
    process = run(killed, tmp_path / "captures")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = len(files(tmp_path))
    assert left == (moment == "before the name reaches the disk")
    again = run(script, tmp_path / "captures")
    assert (again.communicate()[0].strip(), again.returncode) == (str(1 - left), 0)
    assert run(script, tmp_path / "captures").communicate()[0].strip() == "0"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(("limit", "left"), [(0, 1), (1024, 2)])
def test_the_cache_limit_bounds_the_folder(
    limit: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_CACHE_LIMIT_MB", str(limit))
    step(model(tmp_path))
    step(model(tmp_path), double=True)
    assert len(files(tmp_path)) == left


def test_modules_that_name_each_other_have_few_paths() -> None:
    """`torch.nn.torch.nn.torch` and so on: to go into each again took MiniLM's capture 45 s and no end."""
    one, other = ModuleType("one"), ModuleType("other")
    one.other, other.one = other, one  # type: ignore[attr-defined]  # modules take what they are given
    assert list(executed_code._paths("one", one, ("one", "other"))) == ["one", "one.other", "one.other.one"]
