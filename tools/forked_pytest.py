"""Runs pytest in forks of a process that has imported PyTorch and its like once: each import takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.working_copy import ROOT

# Nothing of this repository: a fork imports that from the folder that it is given.
_PRELOADED = (
    *("numpy", "onnx", "onnx_ir", "sympy", "hypothesis", "torch", "torch.export", "torch._dynamo"),
    *("torch._functorch.aot_autograd", "torch._inductor.compile_fx", "torch.onnx"),
)
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(list(_PRELOADED))


def run(
    tests: Sequence[str],
    options: Sequence[str],
    folder: Path,
    variables: Mapping[str, str],
    output: Path,
    limit_s: float | None = None,
) -> int | None:
    """Runs tests of the repository in `folder`.

    Args:
        tests: files and node ids; a `*` at the end stands for anything. Empty: the default suite.
        options: of pytest.
        folder: a copy of the repository.
        variables: the whole environment.
        output: the file for what is printed.
        limit_s: seconds, after which the process and its children are killed.

    Returns:
        The exit status, negative for a signal; None where the process was killed for lack of time.
    """
    process = _FORKS.Process(target=_run, args=(tests, options, folder, dict(variables), output))
    process.start()
    process.join(limit_s)
    if process.exitcode is not None:
        return process.exitcode
    assert process.pid is not None, "it was started"
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return None


class _Chosen:
    """Keeps the tests that were asked for, of those in their functions."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(matches(item.nodeid, test) for test in self._tests)]


def matches(node_id: str, test: str) -> bool:
    """Return whether a node id is one that a test of `run` names."""
    if test.endswith("*"):
        return node_id.startswith(test[:-1])
    return node_id == test or node_id.startswith((f"{test}::", f"{test}[", f"{test}/"))


def _run(
    tests: Sequence[str], options: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path
) -> None:
    os.setsid()  # a group of its own, to be killed with its children
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name == "tools" or name.startswith("tools.")]:
        del sys.modules[name]
    places = dict.fromkeys(test.partition("[")[0] for test in tests)  # pytest refuses parameters that are not there
    sys.exit(pytest.main([*options, *places], plugins=[_Chosen(tests)] if tests else []))
