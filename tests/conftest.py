"""Skip tests that this machine cannot run, repeat random examples, and fail tests that change global state."""

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
from tests.device_under_test import set_device
from tests.machines import MACHINES, Describe, limited, replace_current

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
LARGE_GB = 8  # memory of a test marked `large`; @pytest.mark.large(gb=16) overrides it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--machine", choices=MACHINES, help="choose kernels as on a machine that tests/machines.py describes"
    )
    parser.addoption("--device", default="cpu", help="compare ops and the models of the zoo on cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    if sys.version_info[:3] == (3, 13, 0):
        drop_warnings_of_slow_guards()
    if (name := config.getoption("--device")) not in ("cpu", "cuda"):
        raise pytest.UsageError(f"--device: expected cpu or cuda, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError(
            "--device cuda: PyTorch finds no CUDA device; leave the option out to compare on the CPU"
        )
    set_device(name)
    if not config.getoption("--slow"):  # with it, each run draws other examples
        hypothesis = importlib.import_module("hypothesis")  # after pytest has prepared its assertions
        hypothesis.settings.register_profile("same examples", derandomize=True, database=None)
        hypothesis.settings.load_profile("same examples")
    library._DELAY_S = 0.0  # build the native library at once instead of after the first step
    if WORKERS > 1:
        # One thread per worker: several thread pools on the same cores slow each other down.
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
    queue_no_seeds()
    write_no_traces()
    gc.set_threshold(10_000, 10, 10)
    if name := config.getoption("--machine"):
        replace_current(limited(MACHINES[name], current_machine()))


def pytest_report_header(config: pytest.Config) -> list[str]:
    machine = current_machine()
    instructions = " ".join(sorted(machine.onednn_instructions))
    return [
        f"machine: {machine.processor}, oneDNN with {instructions or 'no vectors'}, {machine.threads} threads",
        f"slow tests: {'run' if config.getoption('--slow') else 'deselected, as in `make test`; --slow runs them'}",
    ]


def drop_warnings_of_slow_guards() -> None:
    """Suppress PyTorch's warning that guards are slower on Python 3.13.0, because tests count a call's warnings.

    `torch._dynamo.config.issue_3_13_0_warning` would also disable the workaround that keeps guards correct on this
    release: a compiled module would stay in training mode after `eval()`.
    """
    guards = importlib.import_module("torch._dynamo.guards")
    guards.GuardBuilder._get_generic_dict_manager_example_value = staticmethod(lambda example_value: None)


def queue_no_seeds() -> None:
    """Drop seeds for accelerators that this machine lacks, which PyTorch queues until their first use.

    PyTorch formats a stack trace for each at every torch.manual_seed: a third of the time of the tests of ops.
    """
    devices = [(torch.cuda, torch.cuda.random), (torch.xpu, torch.xpu.random), (torch.mtia, torch.mtia)]
    for device, its_random in devices:
        if not device.is_available():
            its_random._lazy_call = lambda callable, **kwargs: None


def write_no_traces() -> None:
    """Keep pytest's handlers off PyTorch's loggers.

    pytest adds handlers to every logger that does not propagate, and with a handler PyTorch formats a trace of each
    capture, with stacks and graphs: an eighth of a capture's time.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger) and not logger.propagate:
            logger.addHandler = lambda handler: None  # type: ignore[method-assign]


def memory_gb() -> float:
    """Return the size of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def why_skip(item: pytest.Item) -> str | None:
    """Return why a test cannot or should not run here, or None."""
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
    """Deselect tests marked slow; skipping thousands would take seconds."""
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := why_skip(item):
        pytest.skip(reason)


def global_state() -> dict[str, object]:
    """Return the global state that a test must leave unchanged."""
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
def loaded_objects_frozen() -> None:
    """Exclude objects that earlier files loaded, over a million with PyTorch's, from garbage collection.

    Collections took a seventh of the time of all tests, most of it in tests that request them. A file that made few
    objects leaves nothing to exclude.
    """
    young, once, twice = gc.get_count()
    allocated, per_collection = young, gc.get_threshold()[0]
    if allocated + per_collection * (once + 10 * twice) > 3 * per_collection:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Seed every test equally, and check that it leaves the global state unchanged."""
    torch.manual_seed(0)
    before = global_state()
    yield
    assert global_state() == before, "this test left global state changed"


@pytest.fixture(autouse=True)
def clean_log() -> Iterator[None]:
    """Restore the package's log level and handlers after a test."""
    log = logging.getLogger("onnxtrain")
    level, handlers = log.level, [*log.handlers]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def described_machine(monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Replace the machine that kernel choice, planning and compiled code depend on.

    `described_machine("avx2", threads=1)` takes the name of a machine in tests/machines.py, or a Machine.
    """

    def describe(machine: str | Machine, **facts: object) -> Machine:
        described = dataclasses.replace(MACHINES[machine] if isinstance(machine, str) else machine, **facts)
        replace_current(described, monkeypatch.setattr)
        return described

    return describe
