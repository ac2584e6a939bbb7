"""The memory of one training step: as the plan predicts it, and as measured from the allocator.

Parameters and optimizer state exist throughout; a step adds activations, gradients and temporaries. Gradients count
from zero, as after `zero_grad()`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from onnxtrain.graph.values import dtype_of
from onnxtrain.observe.allocations import Allocation, Recording, peak_bytes, record
from onnxtrain.observe.memory_timeline import Interval, MemoryTimeline, TensorGroup, held_by_band
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.lifetimes import Allocation as PlannedAllocation
from onnxtrain.plan.lifetimes import Kind, Timeline
from onnxtrain.plan.recompute import RECOMPUTED
from onnxtrain.plan.storage import Storages

_BAND = {
    Kind.KEPT: "activations kept",
    Kind.RESULT: "activations kept",
    Kind.GRADIENT: "gradients",
    Kind.TEMPORARY: "temporary",
}
_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"
_WARMUP_STEPS = 2  # they compile and create the optimizer's state


# Predicted


def predicted(title: str, plan: Timeline, storages: Storages, state: Mapping[str, int]) -> MemoryTimeline:
    """Return the timeline of a plan, without shape arithmetic.

    Gradients are held until the end, also those released earlier: `.grad` then holds them.

    Args:
        title: of the timeline.
        plan: the memory held at each node.
        storages: that the plan was made from.
        state: the bytes held throughout, by band.
    """
    changes = [dict.fromkeys(_BAND.values(), 0) for _ in range(len(plan.nodes) + 1)]
    for one in plan.allocations:
        changes[one.first][_BAND[one.kind]] += one.nbytes
        last = len(plan.nodes) if one.kind is Kind.GRADIENT else one.last
        changes[min(last, len(plan.nodes) - 1) + 1][_BAND[one.kind]] -= one.nbytes
    live = dict.fromkeys(_BAND.values(), 0)
    intervals: list[Interval] = []
    backward = 0
    for position, node in enumerate(plan.nodes):
        live = {band: live[band] + changes[position][band] for band in live}
        if storages.host.issuperset(node.outputs):
            continue
        if position < plan.forward:
            backward = len(intervals) + 1
        now = {**state, **live, "temporary": live["temporary"] + plan.workspace[position]}
        module = node.metadata_props.get("module", "")
        doing = f"{'gradient of ' * ('gradient_of' in node.metadata_props)}{node.op_type} {module}".strip()
        intervals.append(Interval(len(intervals), len(intervals) + 1, held_by_band(now), doing))
    return MemoryTimeline(title, "nodes", tuple(intervals), ((_FORWARD, 0), (_BACKWARD, backward)))


def activations_of(plan: Timeline) -> int:
    """Return the peak of a plan without its gradients, in bytes."""
    without_gradients = replace(plan, allocations=tuple(a for a in plan.allocations if a.kind is not Kind.GRADIENT))
    return without_gradients.peak


def recomputed_in(plan: Timeline) -> set[str]:
    """Return the names of the values that backward recomputes."""
    return {str(v.name) for node in plan.nodes if RECOMPUTED in node.metadata_props for v in node.outputs}


def largest_tensors(
    plan: Timeline, storages: Storages, count: int, recomputed: Iterable[str | None] = ()
) -> list[TensorGroup]:
    """Return the groups of tensors of a step with the most bytes.

    Args:
        plan: the memory held at each node.
        storages: that the plan was made from.
        count: the maximum number of groups.
        recomputed: the names of the values that backward recomputes.
    """
    live_bytes, recomputed_names = plan.live_bytes(), set(recomputed)
    peak = max(range(len(live_bytes)), key=live_bytes.__getitem__, default=0)
    groups: dict[TensorGroup, list[PlannedAllocation]] = {}
    for one in plan.allocations:
        node = one.value.producer()
        assert node is not None  # allocations are made by nodes
        props = node.metadata_props
        status = "recomputed" if one.value.name in recomputed_names else "kept" if one.kind is Kind.KEPT else ""
        key = TensorGroup(
            name="",
            count=0,
            bytes=0,
            op="gradient of " * ("gradient_of" in props) + node.op_type,
            module=_without_numbers(props.get("module", "")),
            line=_short(props.get("line", "")),
            shape=storages.shape(one.value),
            dtype=str(TORCH_DTYPES[dtype_of(one.value)]).removeprefix("torch."),
            held_for=_BAND[one.kind],
            status=status,
        )
        groups.setdefault(key, []).append(one)
    filled = [_filled(key, members, peak) for key, members in groups.items()]
    return sorted(filled, key=lambda group: -group.bytes)[:count]


def _filled(key: TensorGroup, members: Sequence[PlannedAllocation], peak: int) -> TensorGroup:
    modules = {p.metadata_props.get("module", "") for one in members if (p := one.value.producer()) is not None}
    return replace(
        key,
        name=members[0].value.name or "",
        count=len(members),
        bytes=sum(one.nbytes for one in members),
        module=modules.pop() if len(modules) == 1 else key.module,
        at_peak=sum(one.first <= peak <= one.last for one in members),
    )


def _without_numbers(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+", "{}", module)


def _short(line: str) -> str:
    """Return a source location without the folder of installed packages or the current folder."""
    return re.sub(r"^.*/(?:site|dist)-packages/", "", line.removeprefix(f"{Path.cwd()}/"))


# Measured


@dataclass(frozen=True)
class MeasuredStep:
    """The measured memory of a step.

    Attributes:
        timeline: of the whole step.
        activations: the peak of forward and backward without parameter gradients, in bytes.
        state: the bytes held throughout, by band.
    """

    timeline: MemoryTimeline
    activations: int
    state: Mapping[str, int]


def measure_step(
    title: str,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    run: Callable[[], Any],
    loss_of: Callable[[Any], torch.Tensor],
) -> MeasuredStep:
    """Train for a few steps and record the last. The output is held until backward ends, as in most training loops.

    Args:
        title: of the timeline.
        module: to train.
        optimizer: of its parameters; None: no optimizer step.
        run: runs forward and returns the output.
        loss_of: returns the loss of an output.
    """

    def step() -> None:
        with record_function(_FORWARD):
            output = run()
            loss = loss_of(output)
        with record_function(_BACKWARD):
            loss.backward()
        del output, loss
        addresses.update(_address(p.grad) for p in module.parameters() if p.grad is not None)
        if optimizer is not None:
            with record_function(_OPTIMIZER):
                optimizer.step()

    addresses: set[int] = set()
    for _ in range(_WARMUP_STEPS):
        step()
        module.zero_grad()
    addresses.clear()
    recording = record(step)
    state = {"parameters": _bytes([*module.parameters(), *module.buffers()])}
    if optimizer is not None:
        state["optimizer state"] = _bytes(_tensors_of(optimizer.state))
    module.zero_grad()
    return _measured(title, recording, addresses, state)


def _measured(title: str, recording: Recording, gradients: set[int], state: Mapping[str, int]) -> MeasuredStep:
    ranges = {name: recording.range(name) for name in (_FORWARD, _BACKWARD)}
    forward, backward = ranges[_FORWARD], ranges[_BACKWARD]
    ends = [r.end for r in recording.ranges if r.name == _OPTIMIZER]
    start, end = forward.start, max([backward.end, *ends])

    def band(one: Allocation) -> str:
        assert one.start is not None
        if one.address in gradients and one.start >= backward.start and (one.end is None or one.end > backward.end):
            return "gradients"
        crosses = one.start <= forward.end and (one.end is None or one.end > forward.end)
        return "activations kept" if crosses else "temporary"

    own = [one for one in recording.allocations if one.start is not None and start <= one.start <= end]
    bands = {one: band(one) for one in own}
    changes = sorted(
        [(one.start or start, one.bytes, bands[one], one.allocated_by) for one in own]
        + [(one.end, -one.bytes, bands[one], "") for one in own if one.end is not None and one.end <= end],
        key=lambda change: change[0],
    )
    live = dict.fromkeys(_BAND.values(), 0)
    intervals = [Interval(0.0, 0.0, held_by_band(state))]
    for at, change, name, span in changes:
        live[name] += change
        ms = (at - start) / 1000
        last = intervals[-1]
        intervals[-1] = Interval(last.start, ms, last.bytes_by_band, last.doing)
        intervals.append(Interval(ms, ms, held_by_band({**state, **live}), span))
    last = intervals[-1]
    intervals[-1] = Interval(last.start, (end - start) / 1000, last.bytes_by_band, last.doing)
    phases = [
        (r.name, (r.start - start) / 1000) for r in recording.ranges if r.name in (_FORWARD, _BACKWARD, _OPTIMIZER)
    ]
    in_step = [one for one in own if bands[one] != "gradients" and (one.start or start) <= backward.end]
    return MeasuredStep(MemoryTimeline(title, "ms", tuple(intervals), tuple(phases)), peak_bytes(in_step), dict(state))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages; a shared storage counts once."""
    storages = {_address(t): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _tensors_of(state: Mapping[Any, Mapping[str, Any]]) -> list[torch.Tensor]:
    return [value for of_one in state.values() for value in of_one.values() if isinstance(value, torch.Tensor)]
