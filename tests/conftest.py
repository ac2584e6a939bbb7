"""Skips what this machine or this run has no room for, and fails a test that changes global state for the next one."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from onnxtrain.native import library
from onnxtrain.system.machine import Machine, current_machine
from tests.machines import MACHINES, Describe, limited, replace_current

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
LARGE_GB = 8  # what a test marked `large` may need, unless it says so itself: @pytest.mark.large(gb=16)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--machine", choices=MACHINES, help="choose kernels as on a machine that tests/machines.py describes"
    )


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info[:3] == (3, 13, 0):
        drop_warnings_of_slow_guards()
    library._DELAY_S = 0.0  # no first step is waited for
    if WORKERS > 1:
        # One thread a worker: several pools of threads on the same cores are slower than none.
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    queue_no_seeds()
    list_composites_once()
    write_no_traces()
    gc.set_threshold(10_000, 10, 10)
    if name := config.getoption("--machine"):
        replace_current(limited(MACHINES[name], current_machine()))


def pytest_report_header(config: pytest.Config) -> list[str]:
    machine = current_machine()
    instructions = " ".join(sorted(machine.onednn_instructions))
    return [
        f"machine: {machine.processor}, oneDNN with {instructions or 'no vectors'}, {machine.threads} threads",
        f"slow tests: {'run' if config.getoption('--slow') else 'left out, as in `make test`; --slow runs them'}",
    ]


def drop_warnings_of_slow_guards() -> None:
    """Drops PyTorch's warning that its guards are slower on Python 3.13.0: tests count the warnings of a call.

    Not by `torch._dynamo.config.issue_3_13_0_warning`: that also turns off what makes the guards right on this release,
    and a compiled module keeps training after `eval()`.
    """
    guards = importlib.import_module("torch._dynamo.guards")
    guards.GuardBuilder._get_generic_dict_manager_example_value = staticmethod(lambda example_value: None)


def queue_no_seeds() -> None:
    """Seeds of accelerators that this machine lacks are not kept for their first use, which never comes.

    PyTorch keeps each with the text of the stack, at every torch.manual_seed: a third of the time of the tests of ops.
    """
    devices = [(torch.cuda, torch.cuda.random), (torch.xpu, torch.xpu.random), (torch.mtia, torch.mtia)]
    for device, its_random in devices:
        if not device.is_available():
            its_random._lazy_call = lambda callable, **kwargs: None


def list_composites_once() -> None:
    """Looks PyTorch's composite operators up by their names only where their list has changed.

    PyTorch does so for each namespace of operators, twice in an export: 80 ms of the 400 of a small one.
    """
    utils = importlib.import_module("torch._export.utils")
    look_up, known = utils._materialize_cpp_cia_ops, None

    def look_up_changed() -> None:
        nonlocal known
        names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
        if names != known:
            look_up()
            known = names

    utils._materialize_cpp_cia_ops = look_up_changed


def write_no_traces() -> None:
    """PyTorch's own loggers keep pytest's handlers away.

    pytest listens to every logger that does not propagate, and PyTorch writes a trace of each capture, with stacks and
    graphs, as soon as somebody listens: an eighth of a capture's time.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.addHandler = lambda handler: None  # type: ignore[method-assign]


def memory_gb() -> float:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def why_skip(item: pytest.Item) -> str | None:
    """The reason for which a test cannot or should not run here."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        return "gpu: needs a CUDA device"
    if large := item.get_closest_marker("large"):
        needed_gb = large.kwargs.get("gb", LARGE_GB) * WORKERS
        if memory_gb() < needed_gb:
            return f"large: needs {needed_gb} GB of memory for {WORKERS} test processes"
    if item.get_closest_marker("compiler") and not current_machine().can_compile:
        return "compiler: needs Linux and a C++ compiler"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked slow: thousands of skips would take seconds."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := why_skip(item):
        pytest.skip(reason)


def global_state() -> dict[str, object]:
    """What a test must leave as it found it."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("ONNXTRAIN_", "ORTMODULE_"))},
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(autouse=True, scope="module")
def rarely_collected() -> None:
    """The collector looks no more at what earlier files loaded: with PyTorch's, more than a million objects.

    Collections took a seventh of the time of all tests, most of it in those that ask for one.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seeds every test alike, whatever ran before, and compares the global state before and after."""
    torch.manual_seed(0)
    before = global_state()
    yield
    assert global_state() == before, "this test left global state changed"


@pytest.fixture(autouse=True)
def clean_log() -> Iterator[None]:
    """Takes back what a test sets up of the package's log: a level asked for stays, as users expect."""
    log = logging.getLogger("onnxtrain")
    level, handlers = log.level, [*log.handlers]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def described_machine(monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Replaces the facts that kernel choice, planning and compiled code rest on.

    `described_machine("avx2", threads=1)` takes a machine of tests/machines.py, or one that is given whole.
    """

    def describe(machine: str | Machine, **facts: object) -> Machine:
        wish = dataclasses.replace(MACHINES[machine] if isinstance(machine, str) else machine, **facts)
        replace_current(wish, monkeypatch.setattr)
        return wish

    return describe
