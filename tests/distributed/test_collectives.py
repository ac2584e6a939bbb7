"""PyTorch's collectives in a forward: nodes of the graph that call them, in eager's order, on every process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.multiprocessing as mp
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager

WORLD = 2


def reduced_in_place(x: torch.Tensor) -> torch.Tensor:
    """As scripts call it: in place, with a group."""
    total = x.detach().clone()
    dist.all_reduce(total, group=dist.group.WORLD)
    return x * total


def gathered_in_list(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(dist.group.WORLD))]
    dist.all_gather(parts, x.detach(), group=dist.group.WORLD)
    return torch.cat([x, *parts])


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda x: collectives.all_reduce(x, "sum", dist.group.WORLD),
    "all_gather": lambda x: collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
    "dist.all_reduce": reduced_in_place,
    "dist.all_gather": gathered_in_list,
    "reduce_scatter": lambda x: collectives.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD),
}


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.before, self.after = name, nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(COLLECTIVES[self.name](self.before(x)).tanh())
        return result


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    cotangent = torch.linspace(-1, 1, 3, dtype=y.dtype).expand_as(y)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], cotangent)]


def check(name: str, rank: int) -> None:
    """Outputs and gradients are eager's, at two sizes on one capture, whose graph calls the collective."""
    torch.manual_seed(0)
    eager = Layer(name)
    exact = copy.deepcopy(eager).double()
    ours = ORTModule(copy.deepcopy(eager), fallback_policy="FALLBACK_DISABLE")
    for rows in (4, 6):
        torch.manual_seed(rows + rank)
        x = torch.randn(rows, 6)
        triples = zip(gradients(ours, x), gradients(eager, x), gradients(exact, x.double()), strict=True)
        for number, (got, theirs, right) in enumerate(triples):
            assert_no_worse_than_eager(f"{name} {number}", got, theirs, right)
    engine = engine_of(ours)
    assert engine.captures == 1
    called = [n.attributes["operator"].as_string() for n in engine.newest().captured.model.graph if n.op_type == "ATen"]
    assert any("c10d" in operator for operator in called), called


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_a_node(name: str, alone: None) -> None:
    check(name, 0)


def _work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for name in COLLECTIVES:
        check(name, rank)
    dist.destroy_process_group()


def test_checks_of_finite_values_are_not_assumed_between_ranks(alone: None) -> None:
    class Checks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = reduced_in_place(x)
            return total if torch.isfinite(total).all() else -total

    with pytest.raises(CaptureError, match="communicates with other ranks"):
        ORTModule(Checks(), fallback_policy="FALLBACK_DISABLE")(torch.ones(2, 3))


@pytest.mark.slow
def test_two_processes_equal_eager(tmp_path: Path) -> None:
    mp.spawn(_work, (str(tmp_path / "store"),), WORLD)
