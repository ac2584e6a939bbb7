"""shard_parameters: passes skip work, and ranks whose batches have padding communicate like those whose have none."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from onnxtrain import ORTModule, errors
from onnxtrain.distributed.parameters import shard_parameters
from onnxtrain.execute import unit_builder
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops import view
from onnxtrain.ops.collective import parameters, transfers
from onnxtrain.passes.pack_tokens import PackingPlan
from onnxtrain.testing import assert_no_worse_than_eager
from tests.distributed.test_gathered_parameters import OfGraph, Traffic
from tests.passes.less_work import applied_by
from tests.passes.test_pack_tokens import Encoder, bool_mask, causal_mask

WORDS, CLASSES, IGNORED = 20, 5, -100
PACKED = "without padding"
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch(seed: int, padded: bool, steps: int = 6) -> Batch:
    """Return words, their mask, and labels, which padding and some words lack."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, steps, (4, 1), generator=generator) if padded else torch.full((4, 1), steps)
    mask = (torch.arange(steps) < lengths).long()
    words, labels = (torch.randint(1, most, (4, steps), generator=generator) for most in (WORDS, CLASSES))
    return words * mask, mask, labels.masked_fill((mask == 0) | (words < 8), IGNORED)


def loss_of(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return loss


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of two whose collectives exchange nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def packing(model: nn.Module, mesh: DeviceMesh, **gathering: int) -> ORTModule:
    return ORTModule(shard_parameters(model, mesh, **gathering), skip_padding="always")


class Shapes(Traffic):
    """Records what is communicated, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[str, list[torch.Size]]] = []

    def gather(self, *results: torch.Tensor) -> None:
        self.order.append(("gather", [result.shape for result in results]))

    def reduce(self, *operands: torch.Tensor) -> None:
        self.order.append(("reduce", [operand.shape for operand in operands]))


@pytest.mark.parametrize("head", ["labels", pytest.param("output", marks=pytest.mark.slow)])
def test_batches_with_and_without_padding_communicate_alike(
    head: str, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = packing(Encoder(bool_mask, head=head), mesh, least_bytes=1, bucket_bytes=2000, in_flight_bytes=3000)
    orders = []
    for step, padded in enumerate((False, True, True, False)):
        shapes = Shapes()
        for module in (parameters, transfers):
            monkeypatch.setattr(module, "functional_collectives", OfGraph(shapes, torch.ops._c10d_functional))
        loss_of(subject(*batch(step, padded))).backward()
        monkeypatch.undo()
        orders.append(shapes.order)
    assert len(orders[0]) > 10
    assert orders.count(orders[0]) == len(orders)
    assert list(subject.report().variants) == [PACKED]


def test_padding_is_not_skipped_if_ranks_would_communicate_otherwise(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The graph without padding is given another order of parameters."""
    apply = PackingPlan.apply

    def apply_and_renumber(self: PackingPlan, *arguments: Any) -> None:
        apply(self, *arguments)
        for gather in (node for node in self.graph if node.op_type == "GatherParameters"):
            gather.attributes["orders"] = ir.AttrInt64s("orders", [99 - order for order in view(gather).orders])

    monkeypatch.setattr(PackingPlan, "apply", apply_and_renumber)
    subject = packing(Encoder(bool_mask, head="labels"), mesh)
    for _ in range(2):
        subject(*batch(0, True)).backward()
    assert not subject.report().variants
    assert len([line for line in caplog.messages if "runs with padding" in line]) == 1
    assert engine_of(subject).captures == 1


def test_a_backward_that_would_communicate_otherwise_is_refused(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = packing(Encoder(bool_mask, head="labels"), mesh)
    loss = subject(*batch(0, True))
    monkeypatch.setattr(unit_builder, "exchanges", lambda nodes: [object()])
    with pytest.raises(errors.CommunicationError, match='skip_padding="never"'):
        loss.backward()


# Several processes

STEPS = [(True, True), (False, False), (True, False), (False, True), (True, True)]  # which rank's batch has padding
CASES: dict[str, dict[str, Any]] = {
    "labels": {},
    "mean": {"bucket_bytes": 2000, "in_flight_bytes": 3000, "least_bytes": 1},
    "output": {"bucket_bytes": 0, "in_flight_bytes": 0, "least_bytes": 1},
}


def train(head: str, dtype: torch.dtype, gathering: dict[str, Any] | None, **options: Any) -> tuple[list[Any], Any]:
    """Train with batches of which some have padding. Without `gathering`: FSDP2 over eager."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = Encoder(causal_mask if head == "labels" else bool_mask, head=head).to(dtype)
    if gathering is None:
        model = fully_shard(model, mesh=mesh)
    else:
        model = ORTModule(shard_parameters(model, mesh, **gathering), skip_padding="always", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step, padded in enumerate(STEPS):
        loss = loss_of(model(*batch(2 * step + dist.get_rank(), padded[dist.get_rank()], 5 + step % 2)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.full_tensor().detach() for p in model.parameters())], model  # type: ignore[attr-defined]


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for head, gathering in CASES.items():
        theirs, _ = train(head, torch.float32, None)
        exact, _ = train(head, torch.float64, None)
        for budget in (None, 2**20):
            got, subject = train(head, torch.float32, gathering, memory_budget_bytes=budget)
            for number, (ours, eager, right) in enumerate(zip(got, theirs, exact, strict=True)):
                assert_no_worse_than_eager(f"{head} {budget} {number}", ours, eager, right)
            report = subject.report()
            assert list(report.variants) == [PACKED + ", causal" * (head == "labels")]
            assert applied_by(subject, "pack_tokens")
            assert engine_of(subject).captures == 1
    dist.destroy_process_group()


@pytest.mark.slow
def test_ranks_with_and_without_padding_train_as_fsdp_over_eager(tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    mp.start_processes(work, (str(tmp_path / "store"),), 2, start_method="forkserver")
