"""Run pytest in forks of a process that has imported PyTorch and others once, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tools.working_copy import ROOT

# No modules of this repository: a fork imports those from its own folder.
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
    """Run tests of the repository in `folder`.

    Args:
        tests: files and node ids; a final `*` matches anything. Empty: the default suite.
        options: options of pytest.
        folder: a copy of the repository.
        variables: all environment variables.
        output: the file for the output.
        limit_s: the seconds after which the process and its children are killed.

    Returns:
        The exit status, negative for a signal; None after a timeout.
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
    """Deselects all tests but the requested ones."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._tests = tests

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(matches(item.nodeid, test) for test in self._tests)]


def matches(node_id: str, test: str) -> bool:
    """Return whether a node id is selected by an entry of the `tests` of `run`."""
    if test.endswith("*"):
        return node_id.startswith(test[:-1])
    return node_id == test or node_id.startswith((f"{test}::", f"{test}[", f"{test}/"))


def _run(
    tests: Sequence[str], options: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path
) -> None:
    os.setsid()  # a new process group, so that it can be killed with its children
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name == "tools" or name.startswith("tools.")]:
        del sys.modules[name]
    node_ids = dict.fromkeys(test.partition("[")[0] for test in tests)  # pytest rejects unknown parameters
    sys.exit(pytest.main([*options, *node_ids], plugins=[_Chosen(tests)] if tests else []))
