"""Captures on disk are loaded if nothing has changed that the graph depends on, and only then."""

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
from onnxtrain.capture.stored import cache, entry, folder
from onnxtrain.capture.stored.containers import output_from_json, output_to_json
from onnxtrain.capture.structure import flatten_output
from onnxtrain.testing import assert_no_worse_than_eager
from tests.thinned import slow_but_every, slow_except

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
    """A list with one element for each capture that is not loaded from disk."""
    calls: list[int] = []
    original = onnxtrain.frontend.engine.capture

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(onnxtrain.frontend.engine, "capture", counting)
    return calls


@pytest.fixture(autouse=True)
def forget_logged_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_logged", set())


def model(tmp_path: Path, make: Callable[[], nn.Module] = Net, **options: Any) -> ORTModule:
    torch.manual_seed(0)
    return ORTModule(make(), rng="torch", kernels="pytorch", cache_dir=tmp_path / "captures", **options)


def values(module: nn.Module, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the logits, and the gradient of each parameter that has one."""
    output = module(x, **kwargs)
    results = {"logits": output.logits}
    if output.loss.requires_grad:
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        results |= dict(zip(named, torch.autograd.grad(output.loss, list(named.values())), strict=True))
    return results


def step(ort: ORTModule, x: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Run one step, and compare it with eager."""
    torch.manual_seed(3)
    x = torch.randn(3, 4, dtype=next(ort.parameters()).dtype) if x is None else x
    actual, eager = values(ort, x, **kwargs), values(ort.module, x, **kwargs)
    with torch.autocast("cpu", enabled=False):
        exact = values(copy.deepcopy(ort.module).double(), x.double(), **kwargs)
    assert actual.keys() == exact.keys()
    for name in exact:
        assert_no_worse_than_eager(name, actual[name], eager[name], exact[name])


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "captures").glob("*.capture"))


@pytest.mark.everywhere
def test_a_second_module_loads_the_capture_from_disk(tmp_path: Path, captures: list[int]) -> None:
    step(model(tmp_path))
    assert len(files(tmp_path)) == len(captures) == 1
    assert (tmp_path / "captures").stat().st_mode & 0o777 == 0o700
    second = model(tmp_path)
    step(second)
    assert len(captures) == 1
    for rows in (1, 2, 5):  # dynamic sizes; those that the first capture has not proven are captured
        step(second, torch.randn(rows, 4))
    step(second, torch.randn(9, 4))  # forward branches on this size: another graph
    assert not len(captures) > 3


class ReturnsMutated(nn.Module):
    """Returns views of an input that it mutates, and the sum, which the option keep_outputs may drop."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.neg_()
        return (x * self.weight).sum(), x, x[1:, ::2]


@pytest.mark.parametrize("kept", [None, ("1", "2")])
def test_views_of_a_mutated_input_are_stored(kept: tuple[str, ...] | None, tmp_path: Path, captures: list[int]) -> None:
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        _, mutated, view = model(tmp_path, ReturnsMutated, keep_outputs=kept)(x)
        assert mutated is x
        x.zero_()
        assert view.shape == (rows - 1, 2)
        assert not view.any()
    assert len(captures) == 1


def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    """Return a function that makes a changed network."""

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
    "a parameter that is removed": lambda patch: changed(lambda net: setattr(net.first, "bias", None)),
    "a number in an object": lambda patch: changed(lambda net: setattr(net.settings, "slope", 0.2)),
    "a container in an object": lambda patch: changed(lambda net: net.settings.names.append("b")),
    "an attribute that shadows the class's": lambda patch: changed(lambda net: setattr(net, "offset", 0.75)),
    "a function in an attribute": lambda patch: changed(lambda net: setattr(net, "activation", torch.sigmoid)),
    "a lambda in an attribute": lambda patch: changed(lambda net: setattr(net, "activation", lambda x: x * 2)),
    "eval mode": lambda patch: changed(lambda net: net.eval()),
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


@pytest.mark.parametrize("change", slow_but_every(4, CHANGES))
def test_a_change_needs_another_capture(
    change: str, tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step(model(tmp_path))
    step(model(tmp_path))
    assert len(captures) == 1
    make = CHANGES[change](monkeypatch) or Net
    step(model(tmp_path, make))
    assert len(captures) == 2


def at_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


GLOBAL_STATES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another attention backend": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "a default dtype": contextlib.contextmanager(at_float64),
}


@pytest.mark.parametrize("state", slow_except(GLOBAL_STATES, "autocast", "a default dtype"))
def test_another_global_state_needs_another_capture(state: str, tmp_path: Path, captures: list[int]) -> None:
    x = torch.randn(3, 4)
    step(model(tmp_path), x)
    net = Net()
    with GLOBAL_STATES[state]():
        for _ in range(2):
            ort = ORTModule(net, rng="torch", kernels="pytorch", cache_dir=tmp_path / "captures")
            ort(x)
    assert len(captures) == 2


def test_versions_change_with_the_sources_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version number of the package does not change with every change of its sources."""
    source = tmp_path / "inner" / "module.py"
    source.parent.mkdir()
    monkeypatch.setattr(onnxtrain, "__file__", str(tmp_path / "__init__.py"))
    versions = []
    for text in ("x = 1", "x = 2", "x = 1"):
        source.write_text(text)
        versions.append(fingerprint.versions.__wrapped__())
    assert versions[0] == versions[2] != versions[1]


def test_another_kind_of_call_needs_another_capture(tmp_path: Path, captures: list[int]) -> None:
    step(model(tmp_path))
    step(model(tmp_path), double=True)
    step(model(tmp_path), torch.randn(3, 4).requires_grad_())
    step(model(tmp_path), torch.randn(4, 3).T)
    assert len(captures) == 4
    step(model(tmp_path), double=True)
    assert len(captures) == 4


# Captures that cannot be stored


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
    module: nn.Module = scope["FromText"]()
    return module


NOT_STORABLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a custom autograd function": (CallsFunction, "Python function"),
    "a global tensor": (ReadsGlobalTensor, "the global TABLE"),
    "a list of tensors": (HasTable, "Tensor"),
    "a variable": (ReadsVariable, "environ"),
    "code without a file": (from_text, "not in a (module|file)"),
}


@pytest.mark.parametrize(
    "case", slow_except(NOT_STORABLE, "a custom autograd function", "a global tensor", "code without a file")
)
def test_a_capture_that_depends_on_this_process_is_not_stored(
    case: str, tmp_path: Path, captures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    make, reason = NOT_STORABLE[case]
    caplog.set_level(logging.INFO, "onnxtrain")
    ort = model(tmp_path, make)
    step(ort)
    step(ort, torch.randn(9, 4))
    messages = [r.message for r in caplog.records if "not stored on disk" in r.message]
    assert len(messages) == 1
    assert re.search(reason, messages[0])
    assert not files(tmp_path)
    step(model(tmp_path, make))
    assert len(captures) == 3


def test_nothing_is_stored_if_a_source_file_changed_since_the_process_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executed_code, "_process_start", lambda: 0.0)
    step(model(tmp_path))
    assert not files(tmp_path)


class CollectionCounter:
    """A callback of the garbage collector that is an object."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        count_collection(phase, info)


COLLECTIONS = [0]


def count_collection(phase: str, info: dict[str, int]) -> None:
    COLLECTIONS[0] += 1


CALLBACKS = {"function": count_collection, "object": CollectionCounter()}


@pytest.mark.parametrize("name", slow_except(CALLBACKS, "object"))
def test_callbacks_of_the_garbage_collector_do_not_count_as_code_of_forward(
    name: str, tmp_path: Path, captures: list[int]
) -> None:
    callback: Callable[..., None] = CALLBACKS[name]
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


def test_under_a_profiler_nothing_is_stored_and_the_profiler_stays_on(tmp_path: Path) -> None:
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        step(model(tmp_path))
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert events
    assert not files(tmp_path)


# The folder


def corrupt(file: Path, defect: str) -> None:
    data = file.read_bytes()
    if defect == "truncated":
        file.write_bytes(data[: len(data) // 2])
    elif defect == "empty":
        file.write_bytes(b"")
    elif defect == "other bytes":
        file.write_bytes(data.replace(b"leaky_relu", b"leaky_rely"))
    else:
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, part in parts.items():
                other_format = part.replace(f'"format": {entry.FORMAT}'.encode(), b'"format": 0')
                archive.writestr(name, other_format if defect == "another format" else b"{")


@pytest.mark.parametrize(
    "defect",
    slow_except(["truncated", "empty", "other bytes", "another format", "no JSON"], "truncated", "another format"),
)
def test_a_corrupt_file_is_replaced_with_one_warning(
    defect: str, tmp_path: Path, captures: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    step(model(tmp_path))
    (file,) = files(tmp_path)
    corrupt(file, defect)
    caplog.set_level(logging.WARNING, "onnxtrain")
    for _ in range(2):
        step(model(tmp_path))
    assert len(captures) == 2  # the second step has replaced the file
    assert sum("is corrupt" in r.message for r in caplog.records) == 1


@pytest.mark.everywhere
@pytest.mark.parametrize("error_code", slow_except([errno.ENOSPC, errno.EROFS, errno.EACCES], errno.ENOSPC))
def test_training_continues_if_no_file_can_be_written(
    error_code: int,
    tmp_path: Path,
    captures: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def failing(file: Path) -> Any:
        raise OSError(error_code, os.strerror(error_code), str(file))

    monkeypatch.setattr(folder, "replacing", failing)
    caplog.set_level(logging.WARNING, "onnxtrain")
    for _ in range(2):
        step(model(tmp_path))
    assert len(captures) == 2
    assert sum(os.strerror(error_code) in r.message for r in caplog.records) == 1


def test_training_continues_if_the_folder_is_a_file(tmp_path: Path, captures: list[int]) -> None:
    (tmp_path / "captures").write_text("")
    step(model(tmp_path))
    assert len(captures) == 1


def test_another_users_file_is_not_read(tmp_path: Path, captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    step(model(tmp_path))
    (file,) = files(tmp_path)
    monkeypatch.setattr(folder, "_is_ours", lambda candidate: candidate != file)
    step(model(tmp_path))
    assert len(captures) == 2


def test_the_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    stored = folder.CaptureFolder(tmp_path, 250)
    first, second = (stored.add(key, key.encode() * 100) for key in "ab")
    assert first is not None
    assert second is not None
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    abandoned, recent = tmp_path / ".c-1.capture.aa.partial", tmp_path / ".c-2.capture.bb.partial"
    for file in (abandoned, recent):
        file.write_bytes(b"x")
    os.utime(abandoned, (1, 1))
    stored.mark_used(first)
    third = stored.add("c", b"c" * 100)
    assert {*tmp_path.iterdir()} == {first, third, recent}
    stored.add("d", b"d" * 1000)  # larger than the limit: it stays as the only file
    assert [file.name[0] for file in tmp_path.glob("*.capture")] == ["d"]


def test_other_classes_than_containers_are_not_instantiated(tmp_path: Path) -> None:
    for name in ("subprocess:Popen", "os:system", "builtins:object", "nowhere:Class", "collections:OrderedDict.x"):
        with pytest.raises(ValueError, match=r"(does not exist|not a container)"):
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
def test_structures_are_loaded_as_they_were_stored(output: Any) -> None:
    leaves, structure = flatten_output(output)
    loaded = output_from_json(json.loads(json.dumps(output_to_json(structure))))
    assert loaded == structure
    assert loaded.names == structure.names
    rebuilt = loaded.unflatten(leaves, ())
    assert type(rebuilt) is type(output)
    assert repr(rebuilt) == repr(output)


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
    captures = []
    original = onnxtrain.frontend.engine.capture
    onnxtrain.frontend.engine.capture = lambda *args, **kwargs: captures.append(1) or original(*args, **kwargs)
    net = Net()
    ort = ORTModule(net, kernels="pytorch", cache_dir=sys.argv[1])
    x = torch.randn(3, 4)
    assert torch.equal(ort(x), net(x))
    print(len(captures))
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
    concurrent = [run(script, tmp_path / "captures") for _ in range(2)]
    assert all(process.communicate()[0].strip() in ("0", "1") for process in concurrent)
    assert len(files(tmp_path)) == 1  # both write the same bytes
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
def test_a_process_killed_while_it_writes_leaves_no_corrupt_file(moment: str, tmp_path: Path) -> None:
    source = textwrap.dedent(SCRIPT).replace("FACTOR", "2")
    script, killed = tmp_path / "script.py", tmp_path / "killed.py"
    script.write_text(source)
    kill = "import os, signal, onnxtrain.system.atomic_file\ndef kill(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    # It writes the file of the other script, because the path of a script is not part of the key.
    killed.write_text(f"{kill}{KILL[moment]}\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    time.sleep(0.1)
    process = run(killed, tmp_path / "captures")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    stored = len(files(tmp_path))
    assert stored == (moment == "before the name reaches the disk")
    second = run(script, tmp_path / "captures")
    assert (second.communicate()[0].strip(), second.returncode) == (str(1 - stored), 0)
    assert run(script, tmp_path / "captures").communicate()[0].strip() == "0"
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(("limit", "remaining"), [(0, 1), (1024, 2)])
def test_the_cache_limit_bounds_the_folder(
    limit: int, remaining: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXTRAIN_CACHE_LIMIT_MB", str(limit))
    step(model(tmp_path))
    step(model(tmp_path), double=True)
    assert len(files(tmp_path)) == remaining


def test_modules_that_refer_to_each_other_have_few_paths() -> None:
    """Without a limit, paths such as `torch.nn.torch.nn.torch` took more than 45 s in MiniLM's capture."""
    one, other = ModuleType("one"), ModuleType("other")
    one.other, other.one = other, one  # type: ignore[attr-defined]  # modules accept any attribute
    assert list(executed_code._paths("one", one, ("one", "other"))) == ["one", "one.other", "one.other.one"]
