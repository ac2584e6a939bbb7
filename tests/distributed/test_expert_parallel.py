"""Mixtures of experts whose experts are sharded over ranks: one graph, which exchanges the tokens by AllToAll."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager

WIDTH, EXPERTS = 6, 4


class Experts(nn.Module):
    """The tokens of each expert are rows, one expert after another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 2)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = zip(torch.split(x, counts.tolist()), up, down, strict=True)
        return torch.cat([F.silu(rows @ into) @ out for rows, into, out in parts])


class Mixture(nn.Module):
    """Sends each token to its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).topk(2)
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
        order = chosen.flatten().argsort(stable=True)
        rows = order // 2
        y = self.experts(x[rows], counts) * scores.flatten()[order].unsqueeze(-1)
        return x + torch.zeros_like(x).index_add(0, rows, y)


class ExpertParallel(ParallelStyle):
    """Exchanges the tokens in hooks around the experts, as torchtitan's style of this name does."""

    def _send(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor]:
        x, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        with torch.no_grad():
            received = torch.ops._c10d_functional.wait_tensor(all_to_all_single(counts, None, None, group))
            received = received.view(ranks, -1)
            self.sent = counts.view(ranks, -1).sum(1).tolist()
            self.received = received.sum(1).tolist()
            # Sort the rows by expert, and those of an expert by rank, in which order the ranks sent them.
            experts = torch.arange(received.shape[1]).expand_as(received)
            of_rows = torch.repeat_interleave(experts.flatten(), received.flatten(), output_size=sum(self.received))
            self.order = of_rows.argsort(stable=True)
        x = all_to_all_single_autograd(x, self.received, self.sent, group)
        return x[self.order], received.sum(0)

    def _return(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> torch.Tensor:
        y = torch.zeros_like(outputs).index_add(0, self.order, outputs)
        return all_to_all_single_autograd(y, self.sent, self.received, mesh.get_group())

    @staticmethod
    def _shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._shard, self._send, self._return)  # type: ignore[arg-type]


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    gradients: Any = [leaf.grad, *(parameter.grad for parameter in module.parameters())]
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


def check(mesh: DeviceMesh) -> None:
    """Results and gradients are eager's on one capture, at two sizes, one of which leaves experts without tokens."""
    models = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        torch.manual_seed(0)
        models.append(parallelize_module(Mixture().to(dtype), mesh, {"experts": ExpertParallel()}))
    ours, eager, exact = models
    subject = ORTModule(ours, fallback_policy="FALLBACK_DISABLE")
    for rows in (12, 3):
        torch.manual_seed(rows + dist.get_rank())
        x = torch.randn(rows, WIDTH)
        compared = zip(results(subject, x), results(eager, x), results(exact, x.double()), strict=True)
        for number, (got, theirs, right) in enumerate(compared):
            assert_no_worse_than_eager(f"{rows} rows, {number}", got, theirs, right)
            assert torch.equal(got, theirs), (rows, number)
    engine = engine_of(subject)
    assert engine.captures == 1
    called = [node.op_type for node in engine.newest().captured.model.graph]
    assert called.count("AllToAll") == 3
    assert isinstance(ours.get_parameter("experts.up").grad, DTensor)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_experts_are_a_part_of_the_graph(mesh: DeviceMesh) -> None:
    check(mesh)


def work(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    check(init_device_mesh("cpu", (world,)))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_processes_exchange_tokens_as_in_eager(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world), world, start_method="forkserver")
