"""shard_parameters: bytes in flight and live bytes of a step, counted in two processes over gloo."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from onnxtrain import ORTModule
from onnxtrain.distributed.parameters import shard_parameters
from onnxtrain.ops.collective import parameters, transfers
from onnxtrain.torch_compat.tensors import storage_id
from tests.plan.measured import peak_of

WIDTH, LAYERS, ROWS, WORLD = 64, 4, 256, 2
BLOCK = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH + 2 * WIDTH)  # bytes of its parameters


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


def build(layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()


class InFlight:
    """Stands for the functional collectives; counts bytes from a collective to the first or last wait for it.

    Attributes:
        ahead: the most bytes of parameters of which none was awaited, besides those that are awaited next.
        reduced: the most bytes of gradients whose reductions were not all awaited.
    """

    def __init__(self, original: Any) -> None:
        self._original = original
        self._gathers: list[tuple[set[int], int]] = []  # the storages that are not awaited yet, and bytes of all
        self._reductions: list[tuple[set[int], int]] = []
        self.ahead = self.reduced = 0

    def _start(self, pending: list[tuple[set[int], int]], results: Sequence[torch.Tensor], nbytes: int) -> None:
        pending.append(({storage_id(result) for result in results}, nbytes))
        self.ahead = max(self.ahead, sum(nbytes for _, nbytes in self._gathers[1:]))
        self.reduced = max(self.reduced, sum(nbytes for _, nbytes in self._reductions))

    def wait_tensor(self, pending: torch.Tensor) -> torch.Tensor:
        storage = storage_id(pending)
        self._gathers = [each for each in self._gathers if storage not in each[0]]  # one reader needs the bucket
        for waiting, _ in self._reductions:
            waiting.discard(storage)
        self._reductions = [each for each in self._reductions if each[0]]
        result: torch.Tensor = self._original.wait_tensor(pending)
        return result

    def all_gather_into_tensor(self, *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._original.all_gather_into_tensor(*args)
        self._start(self._gathers, [result], result.nbytes)
        return result

    def all_gather_into_tensor_coalesced(self, *args: Any) -> list[torch.Tensor]:
        results: list[torch.Tensor] = self._original.all_gather_into_tensor_coalesced(*args)
        self._start(self._gathers, results, sum(result.nbytes for result in results))
        return results

    def reduce_scatter_tensor(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._original.reduce_scatter_tensor(x, *args)
        self._start(self._reductions, [result], x.nbytes)
        return result

    def reduce_scatter_tensor_coalesced(self, xs: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        results: list[torch.Tensor] = self._original.reduce_scatter_tensor_coalesced(xs, *args)
        self._start(self._reductions, results, sum(x.nbytes for x in xs))
        return results


def check_in_flight(bucket_bytes: int, in_flight_bytes: int, layers: int = LAYERS) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = ORTModule(shard_parameters(build(layers), mesh, 1, bucket_bytes, in_flight_bytes))
    counting = InFlight(torch.ops._c10d_functional)
    with (
        mock.patch.object(parameters, "functional_collectives", counting),
        mock.patch.object(transfers, "functional_collectives", counting),
    ):
        for _ in range(2):
            step(model)
    weight = 4 * 4 * WIDTH * WIDTH  # bytes of the largest parameter
    largest = max(bucket_bytes, weight)
    case = bucket_bytes, in_flight_bytes, counting.ahead, counting.reduced
    assert counting.ahead <= in_flight_bytes, case
    assert counting.reduced <= max(in_flight_bytes, largest), case  # one alone is awaited at once
    if in_flight_bytes >= largest:
        assert counting.ahead > in_flight_bytes - largest, case
        assert counting.reduced > in_flight_bytes - largest, case


def live_bytes(model: nn.Module) -> int:
    """Return the most bytes of a step, with those of the parameters that this rank has."""
    step(model)
    held = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    return held + peak_of(lambda: step(model))


def check_live_bytes() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    eager = build()
    for block in eager:
        fully_shard(block, mesh=mesh)
    expected = live_bytes(fully_shard(eager, mesh=mesh))
    for in_flight_bytes in (0, BLOCK):
        ours = live_bytes(ORTModule(shard_parameters(build(), mesh, 1, BLOCK, in_flight_bytes)))
        assert ours <= 1.01 * expected, (in_flight_bytes, ours, expected)


def test_nothing_is_in_flight_unless_allowed() -> None:
    """Counted on rank 0 of two whose collectives exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)  # type: ignore[no-untyped-call]
    try:
        check_in_flight(0, 0, layers=1)
    finally:
        dist.destroy_process_group()


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for bucket_bytes in (0, BLOCK):
        for in_flight_bytes in (0, BLOCK, 3 * BLOCK):
            check_in_flight(bucket_bytes, in_flight_bytes)
    check_live_bytes()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_bytes_in_flight_are_limited_and_live_bytes_are_those_of_fsdp(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"),), WORLD, start_method="forkserver")
