"""Tensor and sequence parallel modules (`parallelize_module`): graphs with collectives and eager's results."""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.errors import CaptureError
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager

CLASSES, WIDTH, HEADS = 12, 8, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        y: torch.Tensor = self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return y


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.relu(self.up(x)))
        return y


class Block(nn.Module):
    """A layer of a transformer; a plain one has neither attention nor norms, whose kernels round unlike eager's."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.feed_norm = nn.Identity() if plain else nn.RMSNorm(WIDTH)
        self.attention_norm, self.attention = (None, None) if plain else (nn.LayerNorm(WIDTH), Attention())
        self.feed = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.attention is not None:
            x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.feed(self.feed_norm(x))
        return y


class Model(nn.Module):
    """A language model; with targets, forward returns the loss."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(plain) for _ in range(3))
        self.norm = nn.Identity() if plain else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss.to_local()  # type: ignore[operator]  # of a DTensor


def tensor_parallel(mesh: DeviceMesh, model: Model, dtensor_logits: bool) -> None:
    """Shard attention and feed forward; activations between them are replicated."""
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    plan |= {"attention.out": RowwiseParallel(), "feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, {k: v for k, v in plan.items() if block.attention is not None or "feed" in k})
    head = ColwiseParallel(use_local_output=False) if dtensor_logits else ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh, {"embedding": ColwiseParallel(output_layouts=Replicate()), "head": head})


def sequence_parallel(mesh: DeviceMesh, model: Model, dtensor_logits: bool) -> None:
    """Shard activations between the layers along the sequence, too, as torchtitan does."""
    rows, replicated = Shard(1), Replicate()
    gather = PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(replicated,))
    scatter = RowwiseParallel(output_layouts=rows)
    attention: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    attention |= {"attention_norm": SequenceParallel(), "attention": gather, "attention.out": scatter}
    both = PrepareModuleInputOutput(
        input_layouts=(rows,),
        desired_input_layouts=(replicated,),
        use_local_input=False,
        output_layouts=(rows,),
        desired_output_layouts=(rows,),
    )
    feed: dict[str, Any] = {"feed": both, "feed.up": ColwiseParallel(), "feed.down": scatter}
    for block in model.blocks:
        plain = block.attention is None
        parallelize_module(block, mesh, feed if plain else {**attention, "feed_norm": SequenceParallel(), **feed})
    outputs = Shard(-1) if dtensor_logits else replicated
    head = ColwiseParallel(input_layouts=rows, output_layouts=outputs, use_local_output=not dtensor_logits)
    embedding = RowwiseParallel(input_layouts=replicated, output_layouts=rows)
    norm = {} if isinstance(model.norm, nn.Identity) else {"norm": SequenceParallel()}
    parallelize_module(model, mesh, {"embedding": embedding, "head": head, **norm})


Parallelize = Callable[[DeviceMesh, Model, bool], None]
PLANS: dict[str, Parallelize] = {"tensor": tensor_parallel, "sequence": sequence_parallel}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor | None) -> list[torch.Tensor]:
    """The result, and the gradients of all parameters, gathered from the ranks."""
    module.zero_grad()
    with nullcontext() if targets is None else loss_parallel():
        y = module(tokens, targets)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) if y.dim() else None)
    return [y.detach(), *(full(p.grad) for p in module.parameters())]


def check(parallelize: Parallelize, mesh: DeviceMesh, plain: bool, with_loss: bool) -> None:
    """Results and gradients are eager's at two lengths on one capture; those of a plain model bit for bit."""
    world = mesh.size()
    models = []
    for dtype in (torch.float32, torch.float32, torch.float64):
        torch.manual_seed(0)
        models.append(Model(plain).to(dtype))
        parallelize(mesh, models[-1], with_loss)
    eager, ours, exact = models
    subject = ORTModule(ours, fallback_policy="FALLBACK_DISABLE")
    for length in (2 * world, 3 * world):
        tokens = torch.randint(CLASSES, (3, length))
        targets = torch.randint(CLASSES, (3, length)).masked_fill_(tokens == 0, -100) if with_loss else None
        compared = zip(*(results(module, tokens, targets) for module in (subject, eager, exact)), strict=True)
        for number, (got, theirs, right) in enumerate(compared):
            assert_no_worse_than_eager(f"{parallelize.__name__} {number}", got, theirs, right)
            assert torch.equal(got, theirs) or not plain, number
    engine = engine_of(subject)
    assert engine.captures == 1
    called = {node.op_type for node in engine.newest().captured.model.graph}
    assert {"WaitCollective", "ReduceScatter" if parallelize is sequence_parallel else "AllReduce"} <= called
    assert ("ShardedCrossEntropy" in called) == with_loss
    for parameter in ours.parameters():
        assert not isinstance(parameter, DTensor) or parameter.grad.placements == parameter.placements  # type: ignore[union-attr]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("plan", PLANS)
def test_a_parallel_module_is_a_graph(plan: str, mesh: DeviceMesh) -> None:
    check(PLANS[plan], mesh, True, plan == "sequence")


def test_a_result_that_is_sharded_is_a_dtensor(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    feed = parallelize_module(Feed(), mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    subject = ORTModule(feed.up, fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(2, 3, WIDTH)
    got, theirs = subject(x), feed.up(x)
    assert isinstance(got, DTensor)
    assert (got.placements, got.shape) == (theirs.placements, theirs.shape)
    assert torch.equal(got.to_local(), theirs.to_local())
    gradients = [torch.autograd.grad(y.square().sum().to_local(), feed.up.weight)[0] for y in (got, theirs)]
    assert torch.equal(*(full(gradient) for gradient in gradients))


class Misused(nn.Module):
    """Applies a function to the DTensor that a parallel layer returns."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(x)).to_local()  # type: ignore[no-any-return]


UNSUPPORTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no rule": (lambda y: torch.cumsum(y, 0), "no rule"),
    "comparison": (lambda y: torch.where(y > 0, y, -y), "no rule"),
    "sharded dimension": (lambda y: torch.softmax(y, -1), "dimensions that a graph does not support"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_rule_runs_in_pytorch(name: str, mesh: DeviceMesh) -> None:
    function, reason = UNSUPPORTED[name]
    torch.manual_seed(0)
    module = parallelize_module(Misused(function), mesh, {"layer": ColwiseParallel(use_local_output=False)})
    x = torch.randn(3, WIDTH)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=reason):
        got = ORTModule(module, pieces=False)(x)
    assert torch.equal(got, expected)


def test_a_change_of_placements_is_another_capture(mesh: DeviceMesh) -> None:
    module = parallelize_module(nn.Linear(WIDTH, WIDTH), mesh, ColwiseParallel())
    subject = ORTModule(nn.Sequential(module), fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        subject(x)
    assert engine_of(subject).captures == 1
    module.weight = nn.Parameter(module.weight.redistribute(placements=[Shard(1)]))
    with pytest.warns(UserWarning, match=r"a linear layer that is sharded by rows has a layout|mixes"):
        ORTModule(nn.Sequential(module), pieces=False)(x)
    with pytest.raises(CaptureError, match="the bias of a linear layer"):
        subject(x)


def train(parallelize: Parallelize, mesh: DeviceMesh, prepared: bool) -> tuple[list[float], nn.Module]:
    """Train a model under FSDP2 over "dp", if the mesh has it, and tensor parallelism over "tp"."""
    torch.manual_seed(0)
    model = Model(plain=True)
    parallelize(mesh["tp"], model, False)
    if prepared:
        onnxtrain.prepare(model, True)
    if "dp" in mesh.mesh_dim_names:  # type: ignore[operator]
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(torch.randint(CLASSES, (3, 4))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def check_blocks(parallelize: Parallelize, mesh: DeviceMesh) -> None:
    """Each block is a graph, and training is bit for bit eager's."""
    (theirs, eager), (got, ours) = (train(parallelize, mesh, prepared) for prepared in (False, True))
    assert got == theirs
    assert all(torch.equal(full(p), full(q)) for p, q in zip(ours.parameters(), eager.parameters(), strict=True))
    report = onnxtrain.report_of(ours)
    assert all(region.compiled is not None for region in report.regions), str(report)


def work(rank: int, store: str, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    warnings.filterwarnings("error", message=".*runs in PyTorch")
    mesh = init_device_mesh("cpu", (world,))
    for parallelize in PLANS.values():
        for plain, with_loss in itertools.product((True, False), repeat=2):
            check(parallelize, mesh, plain, with_loss)
        check_blocks(parallelize, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
        check_blocks(parallelize, init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp")))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_processes_are_bitwise_eager(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"), world), world, start_method="forkserver")
