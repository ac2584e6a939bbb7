"""Plan a training step under FSDP2 on any number of ranks: bytes, collectives, and their overlap with computation.

    module on meta ─fully_shard on a fake process group─▶ one step on fake tensors ─record─▶ events ─simulate─▶ Plan

FSDP2 itself runs, so the order, the sizes and the prefetching of collectives are its own. Times follow from a model:
each rank computes at one rate, and sends over one link, one collective at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from onnxtrain.distributed.step_recorder import (
    COLLECTIVES,
    COMPUTE,
    GATHER,
    PARAMETERS,
    STATE,
    Event,
    StepRecorder,
)
from onnxtrain.frontend.blocks import blocks_of
from onnxtrain.observe.memory_timeline import BANDS, Interval, MemoryTimeline
from onnxtrain.torch_compat.fake_tensors import FakeTensorMode
from onnxtrain.torch_compat.process_groups import fake_store
from onnxtrain.torch_compat.replacement import replaced

_STATES_OF_ADAM = 2  # tensors of the size of each parameter


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 shards a model.

    Attributes:
        replicas: the number of groups that hold the same shards (HSDP); 1 for plain FSDP.
        shards: the number of ranks among which each parameter is divided.
        dtype: the dtype of gathered parameters; None: their own. Gradients are reduced in their own dtype.
        recompute: whether the blocks are checkpointed.
    """

    replicas: int
    shards: int
    dtype: torch.dtype | None = None
    recompute: bool = False


@dataclass(frozen=True)
class Machine:
    """The hardware of a rank.

    Attributes:
        flops: floating-point operations per second.
        link: bytes sent per second.
        latency: seconds of each of the steps of a collective, of which a ring has one less than ranks.
    """

    flops: float
    link: float
    latency: float = 5e-6


@dataclass(frozen=True)
class Plan:
    """A planned step; times are in seconds.

    Attributes:
        events: of the step.
        timeline: the bytes held, over the time.
        compute, communication: how long these take by themselves.
        step: how long both take together.
    """

    events: tuple[Event, ...]
    timeline: MemoryTimeline
    compute: float
    communication: float
    step: float

    @property
    def exposed(self) -> float:
        """The time in which a rank only waits for collectives."""
        return self.step - self.compute

    def collectives(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def mesh_of(sharding: Sharding) -> DeviceMesh:
    """Return the mesh of a sharding, on all ranks of the process group."""
    if sharding.replicas == 1:
        return init_device_mesh("cpu", (sharding.shards,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (sharding.replicas, sharding.shards), mesh_dim_names=("replicate", "shard"))


def record_step(
    module: torch.nn.Module, run: Callable[[], torch.Tensor], sharding: Sharding, mesh: DeviceMesh
) -> list[Event]:
    """Shard a module on the ranks of the process group, and record one step.

    Args:
        module: with or without elements; it is changed.
        run: calls it, and returns the loss.
        sharding: how it is sharded.
        mesh: of that sharding.
    """
    policy = MixedPrecisionPolicy(param_dtype=sharding.dtype, reduce_dtype=torch.float32 if sharding.dtype else None)
    for block in blocks_of(module).values():
        if sharding.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    recorder = StepRecorder(sharding.replicas)
    parameters: Iterable[Any] = module.parameters()  # now DTensors
    for parameter in parameters:
        recorder.hold(parameter.to_local(), PARAMETERS)
    with recorder.recording():
        loss = run()
        recorder.begin("backward")
        loss.backward()
    return recorder.events


def record_fake_step(
    module: torch.nn.Module, run: Callable[..., torch.Tensor], inputs: Any, sharding: Sharding
) -> list[Event]:
    """Record one step of rank 0, on as many ranks as the sharding asks for.

    Args:
        module: on the meta device.
        run: takes the inputs, calls the module and returns the loss.
        inputs: on the meta device: tensors in tuples, lists and dicts.
        sharding: how the module is sharded.
    """
    with fake_ranks(sharding.replicas * sharding.shards):
        mesh = mesh_of(sharding)
        with FakeTensorMode(allow_non_fake_inputs=True), replaced(torch, "chunk", _equal_chunks):
            module.to_empty(device="cpu")
            on_cpu = _on_cpu(inputs)
            return record_step(module, lambda: run(on_cpu), sharding, mesh)


def _equal_chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> list[torch.Tensor]:
    """Return what `torch.chunk` does, with one object for all chunks but the last.

    FSDP2 chunks each parameter several times, and rank 0 takes the first chunk. Creating a fake tensor for each of 128
    chunks took most of the time of a plan.
    """
    size = tensor.shape[dim]
    rows = max(1, -(-size // chunks))
    count = max(1, -(-size // rows))
    last = tensor.narrow(dim, (count - 1) * rows, size - (count - 1) * rows)
    return [*[tensor.narrow(dim, 0, min(rows, size))] * (count - 1), last]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="cpu")
    if isinstance(value, Mapping):
        return {name: _on_cpu(part) for name, part in value.items()}
    return type(value)(map(_on_cpu, value)) if isinstance(value, tuple | list) else value


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of a process group whose collectives exchange nothing."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store.get()())
    try:
        yield
    finally:
        dist.destroy_process_group()


def simulate(events: Sequence[Event], machine: Machine, state: int = 0) -> Plan:
    """Estimate the times of a step.

    A collective starts when the link is free. An all-gather starts no earlier than the computation that follows the
    last wait: FSDP2 holds the result of one while it gathers the next. A reduction starts after the computation
    before it, and a wait ends with the oldest all-gather that is under way.

    Args:
        events: of the step.
        machine: the rates.
        state: the bytes of the optimizer's state.
    """
    now = link = last_wait = compute = communication = backward = 0.0
    under_way: list[float] = []
    intervals: list[Interval] = []
    for event in events:
        start = now
        if event.kind == COMPUTE:
            compute += event.flops / machine.flops
            now += event.flops / machine.flops
        elif event.kind in COLLECTIVES:
            took = event.sent / machine.link + (event.ranks - 1) * machine.latency * bool(event.sent)
            communication += took
            link = max(link, last_wait if event.kind == GATHER else now) + took
            if event.kind == GATHER:
                under_way.append(link)
        elif under_way:
            now = last_wait = max(now, under_way.pop(0))
        if event.phase == "backward" and not backward:
            backward = start
        held = tuple(size + (state if band == STATE else 0) for band, size in zip(BANDS, event.held, strict=True))
        intervals.append(Interval(start * 1e3, now * 1e3, held, f"{event.kind} in {event.phase}"))
    step = max(now, link)
    if step > now:
        intervals.append(Interval(now * 1e3, step * 1e3, intervals[-1].bytes_by_band, "waits for reductions"))
    phases = (("forward", 0.0), ("backward", backward * 1e3))
    timeline = MemoryTimeline("One step on rank 0", "ms", tuple(intervals), phases)
    return Plan(tuple(events), timeline, compute, communication, step)


def adam_state(events: Sequence[Event]) -> int:
    """Return the bytes of Adam's state for the parameters of a recorded step."""
    return _STATES_OF_ADAM * events[0].held[BANDS.index(PARAMETERS)]
