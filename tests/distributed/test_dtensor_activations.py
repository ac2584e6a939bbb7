"""Modules that take, compute with and return DTensors: graphs with eager's results, or a fallback with the reason."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    parallelize_module,
)

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of

WIDTH = 8
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")


class Block(nn.Module):
    """A feed-forward layer whose activations are DTensors throughout, with dropout in either layout.

    Without a residual, gradients are summed in one order: eager adds a replicated one to one rank's partial sum.
    """

    def __init__(self, residual: bool) -> None:
        super().__init__()
        self.residual = residual
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.outer(self.down(self.inner(F.relu(self.up(x)))))
        return x + y if self.residual else y


def parallel_block(mesh: DeviceMesh, placement: Placement) -> nn.Module:
    """A block whose inputs and outputs are DTensors of this placement."""
    styles = {
        "up": ColwiseParallel(input_layouts=placement, use_local_output=False),
        "down": RowwiseParallel(output_layouts=placement, use_local_output=False),
    }
    return parallelize_module(Block(residual=placement.is_shard()), mesh, styles)


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the input and of all parameters, gathered from the ranks."""
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    torch.manual_seed(2)
    y: Any = module(leaf)
    assert y.placements == x.placements  # type: ignore[attr-defined]  # of a DTensor
    (full(y) * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [full(tensor).detach() for tensor in (y, leaf.grad, *(p.grad for p in module.parameters()))]


def check_arguments(mesh: DeviceMesh, placement: Placement) -> None:
    """An argument and a result are DTensors; values and gradients are eager's bit for bit, at two lengths."""
    torch.manual_seed(0)
    block = parallel_block(mesh, placement)
    subject = ORTModule(block, rng="torch", fallback_policy="FALLBACK_DISABLE")
    for length in (4 * mesh.size(), 6 * mesh.size()):
        x = distribute_tensor(torch.randn(3, length, WIDTH), mesh, [placement])
        for got, theirs in zip(results(subject, x), results(block, x), strict=True):
            assert torch.equal(got, theirs)
    assert engine_of(subject).captures == 1


class Scaled(nn.Module):
    """Has parameters that are no DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> torch.Tensor:
        y: torch.Tensor = (x + x).redistribute(placements=[Shard(0)]).to_local() * self.scale
        return y


def check_partial_arguments(mesh: DeviceMesh) -> None:
    """The gradient of each term of a sum is that of the sum."""
    subject = ORTModule(Scaled(), fallback_policy="FALLBACK_DISABLE")
    terms = torch.randn(2 * mesh.size(), WIDTH, requires_grad=True)
    gradients = []
    for module in (subject, engine_of(subject)._module):
        y = module(DTensor.from_local(terms * (dist.get_rank() + 1), mesh, [Partial()], run_check=False))
        gradients.append((y.detach(), torch.autograd.grad(y.square().sum(), terms)[0]))
    assert all(map(torch.equal, *gradients))


class Stack(nn.Module):
    """Blocks between which activations are DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train(mesh: DeviceMesh, prepared: bool) -> list[Any]:
    """Train with dropout, with styles whose hooks give a block DTensors, and run around its graph."""
    torch.manual_seed(0)
    placement = Shard(1)
    model = Stack()
    for index in range(3):
        model.blocks[index] = parallel_block(mesh, placement)
    inputs = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(placement,), use_local_output=False
    )
    outputs = PrepareModuleOutput(output_layouts=(placement,), desired_output_layouts=(Replicate(),))
    parallelize_module(model.blocks[0], mesh, inputs)
    parallelize_module(model.blocks[2], mesh, outputs)
    if prepared:
        onnxtrain.prepare(model, True, rng="torch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randn(3, 2 * mesh.size(), WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if prepared:
        report = onnxtrain.report_of(model)
        assert [region.compiled is not None for region in report.regions] == [True] * 3, str(report)
    return [*losses, *(full(p) for p in model.parameters())]


def check_blocks(mesh: DeviceMesh) -> None:
    assert all(map(torch.equal, train(mesh, True), train(mesh, False)))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_arguments_and_results_are_dtensors(mesh: DeviceMesh, placement: Placement) -> None:
    check_arguments(mesh, placement)


def test_an_argument_is_a_partial_sum(mesh: DeviceMesh) -> None:
    check_partial_arguments(mesh)


def test_hooks_around_blocks_give_dtensors(mesh: DeviceMesh) -> None:
    check_blocks(mesh)


def test_placements_of_an_argument_are_part_of_the_key(mesh: DeviceMesh) -> None:
    class Sum(nn.Module):
        def forward(self, x: Any) -> torch.Tensor:
            return x.redistribute(placements=[Replicate()]).to_local() * 2  # type: ignore[no-any-return]

    subject = ORTModule(Sum(), fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(4, WIDTH)
    for placement in (Replicate(), Shard(0), Shard(1), Replicate()):
        assert torch.equal(subject(distribute_tensor(x, mesh, [placement])), 2 * x)
    assert engine_of(subject).captures == 3


def test_an_argument_that_ranks_do_not_divide_runs_in_pytorch() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(3, WIDTH), mesh, [Shard(0)], src_data_rank=None)
        with pytest.warns(UserWarning, match=r"a dimension that 2 ranks divide evenly"):
            y = ORTModule(nn.ReLU())(x)
        assert torch.equal(y.to_local(), x.to_local().relu())
    finally:
        dist.destroy_process_group()


class Changed(nn.Module):
    """Changes a DTensor in place after another was made of it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: Any = self.first(x)
        before = self.second(h)
        self.function(h)
        return (before + self.second(h)).to_local()  # type: ignore[no-any-return]


def add_one(h: Any) -> None:
    h += 1


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "method": lambda h: h.relu_(),
    "option": lambda h: F.relu(h, inplace=True),
    "operator": add_one,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_changes_in_place_run_in_pytorch(name: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    replicated = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    styles = {"first": replicated, "second": ColwiseParallel(use_local_output=False)}
    module = parallelize_module(Changed(IN_PLACE[name]), mesh, styles)
    x = torch.randn(3, WIDTH)
    with pytest.warns(UserWarning, match="in place"):
        assert torch.equal(ORTModule(module, pieces=False)(x), module(x))


def test_a_dtype_of_another_dtensor_leaves_the_layout(mesh: DeviceMesh) -> None:
    class Cast(nn.Module):
        def forward(self, x: Any, other: Any) -> Any:
            return x.double().type_as(other), x.to(other)

    subject = ORTModule(Cast(), fallback_policy="FALLBACK_DISABLE")
    x, other = (distribute_tensor(torch.randn(4, WIDTH), mesh, [p]) for p in (Replicate(), Shard(0)))
    for y in subject(x, other):
        assert (y.placements, y.dtype) == (x.placements, x.dtype)
        assert torch.equal(y.to_local(), x.to_local())


def work(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    mesh = init_device_mesh("cpu", (world,))
    check_arguments(mesh, Replicate())
    check_arguments(mesh, Shard(1))
    check_blocks(mesh)
    check_partial_arguments(mesh)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_processes_are_bitwise_eager(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world), world, start_method="forkserver")
