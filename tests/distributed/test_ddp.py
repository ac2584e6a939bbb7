"""DistributedDataParallel over ORTModule: 2 and 4 processes on gloo, equal to DistributedDataParallel over the module.

Scenarios "late" release gradients at the end of backward; the others have no option and release them early.
"""

from __future__ import annotations

import copy
import multiprocessing
import statistics
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.zoo.checks import count_captures

WIDTH = 8


class Network(nn.Module):
    """Dropout, BatchNorm's buffers, a frozen layer, and a head that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16, bias=False)  # before a BatchNorm its gradient would be rounding alone
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 3)
        self.other = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, both: bool = True) -> dict[str, torch.Tensor]:
        hidden = self.frozen(self.drop(torch.relu(self.norm(self.first(x)))))
        logits = self.last(hidden) + (self.other(hidden) if both else 0)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(module: nn.Module, rank: int, scenario: str) -> dict[str, Any]:
    """Run some steps; return all values that must be equal."""
    options: dict[str, Any] = {}
    if scenario.endswith("unused"):
        options["find_unused_parameters"] = True
    if scenario == "views":
        options["gradient_as_bucket_view"] = True
    parallel = DistributedDataParallel(module, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    gradients = []
    for step in range(4):
        torch.manual_seed(100 * rank + step)
        x = torch.randn(4 + rank + step % 2, WIDTH).to(next(module.parameters()).dtype)
        labels = torch.randint(3, (x.shape[0],))
        both = not scenario.endswith("unused") or step % 2 == 0
        if scenario.endswith("accumulate") and step % 2 == 0:
            with parallel.no_sync():
                parallel(x, labels, both)["loss"].backward()
            continue
        loss = parallel(x, labels, both)["loss"]
        loss.backward()
        gradients.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach(), "gradients": gradients, "state": parallel.state_dict()}


def equal(got: Any, eager: Any, exact: Any, where: str = "") -> None:
    assert type(got) is type(eager), where
    if isinstance(eager, torch.Tensor):
        assert_no_worse_than_eager(where, got, eager, exact)
    elif isinstance(eager, dict):
        assert list(got) == list(eager), where
        for key, value in eager.items():
            equal(got[key], value, exact[key], f"{where}[{key!r}]")
    elif isinstance(eager, list):
        assert len(got) == len(eager), where
        for index, value in enumerate(eager):
            equal(got[index], value, exact[index], f"{where}[{index}]")
    else:
        assert got == eager, where


def exchange_times(**options: Any) -> tuple[float, float]:
    """Return the start of the first and the last all-reduce, as fractions of backward's processor time (medians)."""
    torch.manual_seed(0)
    module = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.Tanh())))
    parallel = DistributedDataParallel(ORTModule(module, rng="torch", **options), bucket_cap_mb=0.25)
    times: list[float] = []

    def exchange(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        times.append(time.thread_time())  # backward runs in this thread, gloo in others
        return allreduce_hook(dist.group.WORLD, bucket)

    parallel.register_comm_hook(None, lambda _, bucket: exchange(bucket))  # DDP rejects an annotation that is a string
    fractions = []
    for _ in range(9):
        loss = parallel(torch.randn(512, 256)).square().mean()
        times.clear()
        begin = time.thread_time()
        loss.backward()
        took = time.thread_time() - begin
        fractions.append(((times[0] - begin) / took, (times[-1] - begin) / took))
    first, last = zip(*fractions[4:], strict=True)  # the first steps measure kernels
    return statistics.median(first), statistics.median(last)


def check_exchange() -> None:
    """Gradients are exchanged while backward runs; with the option off, after it."""
    first, last = exchange_times()
    assert first < 0.2, first
    assert last > 0.7, last
    late, _ = exchange_times(early_gradients=False)
    assert late > 0.5, late


def check_training(rank: int, scenario: str) -> None:
    torch.manual_seed(rank)  # DDP broadcasts the first rank's parameters
    module = Network()
    options = {"early_gradients": False} if scenario.startswith("late") else {}
    wrapped = ORTModule(copy.deepcopy(module), rng="torch", **options)
    double = copy.deepcopy(module).double()
    equal(*(train(side, rank, scenario) for side in (wrapped, module, double)))
    expected = 2 if scenario.endswith("unused") else 1
    assert count_captures(wrapped) == expected, "another capture than expected"


def process(rank: int, folder: str, world: int, scenarios: tuple[str, ...]) -> None:
    """Run every scenario in one of the processes; write the failures."""
    torch.set_num_threads(1)
    file = Path(folder) / "rendezvous"
    dist.init_process_group(
        "gloo", init_method=file.as_uri(), rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    try:
        for scenario in scenarios:
            report = ""
            try:
                check_exchange() if scenario == EXCHANGE else check_training(rank, scenario)
            except Exception:  # noqa: BLE001  # the parent shows it
                report = traceback.format_exc()
            (Path(folder) / f"{scenario}-{rank}").write_text(report)
            dist.barrier()
    finally:
        dist.destroy_process_group()


TRAINING = ("plain", "unused", "views", "accumulate", "late", "late-unused", "late-accumulate")
EXCHANGE = "exchange"
IN_TWO_PROCESSES = TRAINING[:5]  # the others are combinations of these


def failures(world: int, scenarios: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the failures of each process in each scenario."""
    with tempfile.TemporaryDirectory() as folder:
        # Forks of one process that has imported this file: that takes seconds.
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        mp.start_processes(process, (folder, world, scenarios), nprocs=world, start_method="forkserver")
        return {s: [(Path(folder) / f"{s}-{r}").read_text() for r in range(world)] for s in scenarios}


@pytest.fixture(scope="module")
def reports() -> dict[str, list[str]]:
    return failures(2, (*IN_TWO_PROCESSES, EXCHANGE))


needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo"
)


@needs_gloo
@pytest.mark.parametrize("scenario", IN_TWO_PROCESSES)
def test_ddp_over_ortmodule_equals_ddp_over_eager(scenario: str, reports: dict[str, list[str]]) -> None:
    for rank, report in enumerate(reports[scenario]):
        assert not report, f"rank {rank}:\n{report}"


@needs_gloo
def test_gradients_are_exchanged_while_backward_runs(reports: dict[str, list[str]]) -> None:
    for rank, report in enumerate(reports[EXCHANGE]):
        assert not report, f"rank {rank}:\n{report}"


@needs_gloo
@pytest.mark.slow
def test_four_processes_equal_ddp_over_eager() -> None:
    for scenario, of_ranks in failures(4, TRAINING).items():
        for rank, report in enumerate(of_ranks):
            assert not report, f"{scenario}, rank {rank}:\n{report}"
