"""shard_parameters: a graph gathers sharded parameters and averages their gradients, as FSDP2 over eager does."""

from __future__ import annotations

import copy
import math
import multiprocessing
import re
import weakref
from collections import Counter
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import onnxtrain
from onnxtrain import ORTModule, errors
from onnxtrain.distributed.parameters import shard_parameters
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.collective import parameters, transfers
from onnxtrain.plan.lifetimes import timeline
from onnxtrain.plan.storage import Storages
from onnxtrain.testing import assert_no_worse_than_eager
from onnxtrain.torch_compat.modes import TorchDispatchMode
from tests.passes.less_work import applied_by

WIDTH, CLASSES = 8, 13
ONE = 1  # byte: one parameter is kept for backward


class Block(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.norm, self.dropout = nn.Identity() if plain else nn.LayerNorm(WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.dropout(torch.relu(self.up(self.norm(x)))))
        return y


class Model(nn.Module):
    """A language model that returns the loss of labelled tokens; 13 rows and classes are sharded unevenly.

    With `plain`, each sum is computed in eager's order.
    """

    def __init__(self, plain: bool = True, tied: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.plain = plain
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(plain) for _ in range(layers))
        self.norm = nn.Identity() if plain else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        if self.plain:
            return logits.square().mean()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(seed: int, length: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(CLASSES, (16, length), generator=generator)
    return tokens, tokens.roll(1, 1).masked_fill(tokens < 4, -100)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def fake_mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of two whose collectives exchange nothing: for counting."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def sharded(
    model: nn.Module,
    mesh: DeviceMesh,
    least_bytes: int = ONE,
    bucket_bytes: int = 0,
    in_flight_bytes: int = 0,
    **options: Any,
) -> ORTModule:
    return ORTModule(shard_parameters(model, mesh, least_bytes, bucket_bytes, in_flight_bytes), rng="torch", **options)


def test_parameters_are_gathered_in_both_directions(mesh: DeviceMesh) -> None:
    """Each before its first reader; those that backward reads again there, but for the last, which is kept."""
    torch.manual_seed(0)
    model = Model()
    subject = sharded(copy.deepcopy(model), mesh)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(*batch(seed))
        torch.manual_seed(seed)
        got = subject(*batch(seed))
        assert torch.equal(got, expected)
        got.backward()
        expected.backward()
    for (name, ours), theirs in zip(subject.named_parameters(), model.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor), name
        assert ours.grad.placements == ours.placements, name  # type: ignore[attr-defined]
        assert torch.equal(ours.grad.full_tensor(), theirs.grad), name  # type: ignore[arg-type]
    engine = engine_of(subject)
    assert engine.captures == 1
    parts = engine.newest().parts
    assert parts is not None
    count = len(list(model.parameters()))
    assert Counter(node.op_type for node in parts.forward.nodes)["GatherParameters"] == count
    backward = Counter(node.op_type for node in parts.backward.nodes)
    assert (backward["GatherParameters"], backward["ReduceGradients"]) == (2, count)  # of `up` and `down` the weights


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1)], ids=str)
def test_a_state_dict_is_that_of_fully_shard(shape: tuple[int, ...], fake_mesh: DeviceMesh) -> None:
    eager = Model()
    if len(shape) == 2:
        fake_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    for block in eager.blocks:
        fully_shard(block, mesh=fake_mesh)
    expected = fully_shard(eager, mesh=fake_mesh).state_dict()
    got = sharded(Model(), fake_mesh).state_dict()
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert tensor.placements == expected[name].placements, name
        assert tensor.to_local().shape == expected[name].to_local().shape, name
        assert tensor.shape == expected[name].shape, name


def test_tied_parameters_stay_tied(mesh: DeviceMesh) -> None:
    model = shard_parameters(Model(tied=True), mesh)
    assert model.head.weight is model.embedding.weight


class Traffic:
    """Counts the bytes of communication.

    Attributes:
        gathered: the bytes of the results of all-gathers.
        reduced: the bytes of the operands of reduce-scatters.
        calls: how many there were of each.
        pending: the number of results that nothing has waited for.
        held: the bytes of gathered results that are held now.
        most_held: the most of these.
    """

    def __init__(self) -> None:
        self.gathered = self.reduced = self.pending = self.held = self.most_held = 0
        self.calls: Counter[str] = Counter()

    def gather(self, *results: torch.Tensor) -> None:
        self.calls["gather"] += 1
        self.pending += len(results)
        for result in results:
            self.gathered += result.nbytes
            self.held += result.nbytes
            weakref.finalize(result.untyped_storage(), self._release, result.nbytes)
        self.most_held = max(self.most_held, self.held)

    def reduce(self, *operands: torch.Tensor) -> None:
        self.calls["reduce"] += 1
        self.pending += len(operands)
        self.reduced += sum(operand.nbytes for operand in operands)

    def _release(self, nbytes: int) -> None:
        self.held -= nbytes


class OfEager(TorchDispatchMode):
    """Counts what FSDP2 communicates."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.traffic.gather(args[0])
        elif func.overloadpacket.__name__ == "_reduce_scatter_base_":
            self.traffic.reduce(args[1])
        return result


class OfGraph:
    """Stands for the functional collectives, and counts what a graph communicates."""

    def __init__(self, traffic: Traffic, original: Any) -> None:
        self.traffic, self._original = traffic, original

    def wait_tensor(self, pending: torch.Tensor) -> torch.Tensor:
        self.traffic.pending -= 1
        result: torch.Tensor = self._original.wait_tensor(pending)
        return result

    def all_gather_into_tensor(self, *args: Any) -> torch.Tensor:
        result: torch.Tensor = self._original.all_gather_into_tensor(*args)
        self.traffic.gather(result)
        return result

    def all_gather_into_tensor_coalesced(self, *args: Any) -> list[torch.Tensor]:
        results: list[torch.Tensor] = self._original.all_gather_into_tensor_coalesced(*args)
        self.traffic.gather(*results)
        return results

    def reduce_scatter_tensor(self, x: torch.Tensor, *args: Any) -> torch.Tensor:
        self.traffic.reduce(x)
        result: torch.Tensor = self._original.reduce_scatter_tensor(x, *args)
        return result

    def reduce_scatter_tensor_coalesced(self, xs: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        self.traffic.reduce(*xs)
        results: list[torch.Tensor] = self._original.reduce_scatter_tensor_coalesced(xs, *args)
        return results


def step(subject: nn.Module) -> None:
    subject(*batch(0)).backward()


def traffic_of_eager(model: Model, mesh: DeviceMesh) -> Traffic:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model)  # then FSDP2 knows its order
    traffic = Traffic()
    with OfEager(traffic):
        step(model)
    return traffic


def counted(
    model: Model, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int = 0, in_flight_bytes: int = 0
) -> tuple[ORTModule, Traffic]:
    """Return a model after a step, and what that communicated."""
    traffic = Traffic()
    counting = OfGraph(traffic, torch.ops._c10d_functional)
    for module in (parameters, transfers):
        monkeypatch.setattr(module, "functional_collectives", counting)
    subject = sharded(model, mesh, bucket_bytes=bucket_bytes, in_flight_bytes=in_flight_bytes)
    step(subject)
    return subject, traffic


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_no_more_is_sent_than_by_fsdp(tied: bool, fake_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = traffic_of_eager(Model(plain=False, tied=tied), fake_mesh)
    model = Model(plain=False, tied=tied)
    _, ours = counted(model, fake_mesh, monkeypatch)
    assert 0 < ours.gathered <= theirs.gathered
    assert 0 < ours.reduced <= theirs.reduced


@pytest.mark.parametrize(
    ("bucket_bytes", "gathers", "reduces"),
    [
        # forward gathers what backward reads, and the rest; backward the former
        (2**20, 2 + 1, 1),
        # the weights of `up` and `down` are as large as a bucket; forward, backward
        pytest.param(24 * WIDTH * 4, 2 + 2 + 2, 2 + 2, marks=pytest.mark.slow),
    ],
    ids=["all", "some"],
)
def test_small_parameters_are_communicated_together(
    bucket_bytes: int, gathers: int, reduces: int, fake_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without buckets there is a collective for each parameter and direction; the bytes are the same."""
    model = Model()
    subject, traffic = counted(model, fake_mesh, monkeypatch, bucket_bytes)
    assert traffic.calls == {"gather": gathers, "reduce": reduces}
    weights = 2 * 24 * WIDTH  # of `up` and `down`, which backward reads
    everything = weights + 24 + WIDTH + 2 * (CLASSES + 1) * WIDTH  # 13 rows are padded to an even number
    assert (traffic.gathered, traffic.reduced) == (4 * (everything + weights), 4 * everything)
    torch.autograd.grad(subject(*batch(0)), [model.blocks[0].down.bias])
    assert traffic.pending == 0  # also of what this backward does not read


@pytest.mark.slow
def test_gathered_parameters_are_released(fake_mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most those of one block are held, besides the one that is kept and the one that backward reads next.

    More are held to gather them early, and the prediction of memory contains them.
    """
    model = Model(layers=3)
    largest = max(parameter.nbytes for parameter in model.parameters())
    bound = 2 * largest + (CLASSES + 1) * WIDTH * 4  # rows of the head are padded to an even number
    subject, traffic = counted(model, fake_mesh, monkeypatch)
    assert 0 < traffic.most_held <= bound
    assert traffic.held == 0
    monkeypatch.undo()
    early, more = counted(Model(layers=3), fake_mesh, monkeypatch, in_flight_bytes=3000)
    assert traffic.most_held + 2000 <= more.most_held <= traffic.most_held + 3000
    assert more.calls == traffic.calls
    assert predicted_peak(subject) + 2000 <= predicted_peak(early) <= predicted_peak(subject) + 2 * 3000


def predicted_peak(subject: ORTModule) -> int:
    compiled = engine_of(subject).newest()
    parts = compiled.parts
    assert parts is not None
    nodes = (*parts.forward.nodes, *parts.backward.nodes)
    return timeline(parts, Storages(nodes, compiled.symbol_values, "cpu")).peak


def collectives(rank: int, **options: Any) -> list[tuple[str, Any]]:
    """Return the collectives of a step on one of two ranks, with the shapes of their results.

    The sentences of rank 1 are longer.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)  # type: ignore[no-untyped-call]
    try:
        subject = sharded(Model(plain=False, layers=2), init_device_mesh("cpu", (2,)), **options)
        subject(*batch(0, 5 + 30 * rank)).backward()
        parts = engine_of(subject).newest().parts
        assert parts is not None
        nodes = (*parts.forward.nodes, *parts.backward.nodes)
        return [(node.op_type, [v.shape for v in node.outputs]) for node in nodes if node.op_type in COLLECTIVES]
    finally:
        dist.destroy_process_group()


COLLECTIVES = ("GatherParameters", "ReduceGradients")


OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {},
    "budget": {"memory_budget_bytes": 0.85},
    "buckets": {"memory_budget_bytes": 0.85, "bucket_bytes": 1000, "in_flight_bytes": 2000},
    "layers": {"recompute": "layers"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_whose_batches_differ_communicate_alike(name: str) -> None:
    """Also of 13 rows, rank 1 has 6: its graph pads them."""
    first, second = (collectives(rank, **OPTIONS[name]) for rank in range(2))
    assert first == second
    if name != "buckets":
        assert len(first) == 16 + 7 + 16  # gathered, gathered again, reduced


def plain(model: Model, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(torch.ones(CLASSES, WIDTH))


def replicated(model: Model, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(CLASSES, WIDTH), mesh, [Replicate()]))


def by_columns(model: Model, mesh: DeviceMesh) -> None:
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(CLASSES, WIDTH), mesh, [Shard(1)]))


def on_two_dimensions(model: Model, mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(CLASSES, WIDTH), both, [Shard(0), Shard(1)]))


def buffered(model: Model, mesh: DeviceMesh) -> None:
    model.norm.register_buffer("scale", distribute_tensor(torch.ones(WIDTH), mesh, [Shard(0)]))


def hooked(model: Model, mesh: DeviceMesh) -> None:
    model.norm.register_forward_hook(lambda *arguments: None)


def nothing_sharded(model: Model, mesh: DeviceMesh) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else nn.Parameter(parameter.to_local(), False)  # type: ignore[attr-defined]


REFUSED: dict[str, tuple[Callable[[Model, DeviceMesh], None], str]] = {
    "a plain parameter": (plain, r"not sharded: the gradients of the ranks would not be averaged.*head.weight"),
    "a replicated parameter": (replicated, r"Shard\(0\).*Replicate\(\)"),
    "another dimension": (by_columns, r"head.weight.*Shard\(0\).*Shard\(1\)"),
    "two dimensions": (on_two_dimensions, r"Replicate\(\), Shard\(0\).*Shard\(0\), Shard\(1\)"),
    "a buffer": (buffered, "a buffer is sharded"),
    "hooks": (hooked, "submodules have hooks"),
    "no shards": (nothing_sharded, "0 meshes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_layouts_are_refused(name: str, mesh: DeviceMesh) -> None:
    change, message = REFUSED[name]
    model = shard_parameters(Model(), mesh)
    change(model, mesh)
    with pytest.raises(errors.CaptureError) as error:
        ORTModule(model)(*batch(0))
    assert re.search(message, str(error.value), re.DOTALL), error.value
    assert any("cannot run in PyTorch" in note for note in error.value.__notes__)


def test_second_derivatives_are_refused(mesh: DeviceMesh) -> None:
    subject = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), mesh)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with pytest.warns(UserWarning, match="create_graph"), pytest.raises(errors.KernelError, match="create_graph=True"):
        torch.autograd.grad(subject(x).sum(), x, create_graph=True)


def test_blocks_are_not_prepared_alone(mesh: DeviceMesh) -> None:
    model = shard_parameters(Model(), mesh)
    with pytest.raises(errors.OptionError, match="need one graph"):
        onnxtrain.prepare(model, regional=True)
    onnxtrain.prepare(model)
    model(*batch(0)).backward()
    assert not onnxtrain.report_of(model).by_block


@pytest.mark.parametrize("problem", ["mesh", "scalar", "bytes", "fully_shard"])
def test_what_cannot_be_sharded_is_refused(problem: str, mesh: DeviceMesh) -> None:
    module = nn.Linear(2, 2)
    if problem == "scalar":
        module.scale = nn.Parameter(torch.tensor(1.0))
    elif problem == "mesh":
        mesh = init_device_mesh("cpu", (1, 1, 1))
    elif problem == "fully_shard":
        parallelize_module(module, init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), ColwiseParallel())
    with pytest.raises(errors.OptionError, match=problem):
        shard_parameters(module, mesh, int(problem != "bytes"))


# Several processes

STEPS = 3
WAYS: dict[str, dict[str, Any]] = {
    "one kept": {"least_bytes": ONE},
    "in buckets": {"bucket_bytes": 1000, "in_flight_bytes": 2000},
    "in one bucket": {"bucket_bytes": 2**20, "memory_budget_bytes": 0.85},
    "early": {"in_flight_bytes": 2**20, "recompute": "layers"},
    "early, gradients at the end": {"in_flight_bytes": 2000, "early_gradients": False},
    "some kept": {"least_bytes": 3000},
    "within a budget": {"least_bytes": ONE, "memory_budget_bytes": 0.8},
    "layers recomputed": {"least_bytes": ONE, "recompute": "layers"},
    "gradients at the end": {"least_bytes": ONE, "early_gradients": False},
}


def train(
    options: dict[str, Any] | None, shape: tuple[int, ...], dtype: torch.dtype, plain: bool
) -> tuple[list[Any], nn.Module]:
    """Train with dropout; each rank has batches of its own, of several lengths. Without options: FSDP2 over eager."""
    torch.manual_seed(0)
    model = Model(plain, tied=not plain, layers=3).to(dtype)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if options is None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        subject: nn.Module = fully_shard(model, mesh=mesh)
    else:
        subject = sharded(model, mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for step in range(STEPS):
        seed = mesh.size() * step + dist.get_rank()
        torch.manual_seed(seed)
        loss = subject(*batch(seed, 4 + seed % 3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.full_tensor().detach() for p in model.parameters())], subject  # type: ignore[attr-defined]


def work(rank: int, store: str, shape: tuple[int, ...], ways: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    world = math.prod(shape)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for plain in (True, False):
        theirs, _ = train(None, shape, torch.float32, plain)
        exact, _ = train(None, shape, torch.float64, plain)
        for name, options in ((way, WAYS[way]) for way in ways):
            got, subject = train(options, shape, torch.float32, plain)
            for number, (ours, eager, right) in enumerate(zip(got, theirs, exact, strict=True)):
                if plain and world == 2:  # of more ranks, gloo adds the gradients in an order that offsets decide
                    assert torch.equal(ours, eager), (name, number)
                assert_no_worse_than_eager(f"{name} {number}", ours, eager, right)
            assert engine_of(subject).captures == 1, name
            rows = [text for stage in subject.report().stages for text in stage.applied if "recompute: " in text]
            assert ("peak" in rows[0]) == bool({"memory_budget_bytes", "recompute"} & options.keys()), (name, rows)
            assert any("GatherParameters" not in row for row in rows[1:]), (name, rows)
            assert plain or applied_by(subject, "skip_ignored_labels"), name
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 1), (2, 2)], ids=str)
def test_training_is_that_of_fsdp_over_eager(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Of two dimensions, the first is that of replicas."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    ways = tuple(WAYS) if len(shape) == 1 else ("in buckets", "early", "gradients at the end")
    mp.start_processes(work, (str(tmp_path / "store"), shape, ways), math.prod(shape), start_method="forkserver")
