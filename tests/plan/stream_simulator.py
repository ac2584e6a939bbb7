"""Simulate the streams of a device: each runs behind the host, and learns of the others only through events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxtrain.ops import definition_of
from onnxtrain.ops.collective.transfers import WAIT
from onnxtrain.plan.cut import Part
from onnxtrain.plan.streams import Phase, Step, number_source


class RaceError(AssertionError):
    """Something is read that may not have been computed yet."""


@dataclass
class Actor:
    """The host or a stream.

    Attributes:
        done: the number of things that it has done.
        seen: how many of those of another it has waited for.
    """

    name: str
    done: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def wait(self, other: Actor, event: int) -> None:
        self.seen[other.name] = max(self.seen.get(other.name, 0), event)


class _Device:
    def __init__(self, part: Part, without: ir.Node | None) -> None:
        self.part, self.without = part, without
        self.host, self.compute, self.collectives = Actor("host"), Actor("compute"), Actor("collectives")
        self.computed: dict[ir.Value, tuple[str, int]] = dict.fromkeys(part.inputs, ("compute", 0))
        self.started: dict[ir.Node, int] = {}

    def read(self, actor: Actor, values: Iterable[ir.Value | None]) -> None:
        for value in values:
            if value is None or value in self.part.host or value.const_value is not None:
                continue
            if value not in self.computed:
                raise RaceError(f"{value.name} is read before it is launched")
            name, time = self.computed[value]
            if name != actor.name and actor.seen.get(name, 0) < time:
                raise RaceError(f"{actor.name} reads {value.name} of {name} without an event")

    def run(self, actor: Actor, node: ir.Node) -> None:
        self.read(actor, node.inputs)
        actor.done += 1
        self.computed.update(dict.fromkeys(node.outputs, (actor.name, actor.done)))

    def start_read(self, node: ir.Node) -> None:
        self.read(self.compute, [number_source(node)])
        self.compute.done += 1
        self.started[node] = self.compute.done

    def finish_read(self, node: ir.Node) -> None:
        if node not in self.started:
            raise RaceError(f"the host reads a number of {node.name} that was not launched")
        if node is not self.without:
            self.host.wait(self.compute, self.started[node])
        if self.host.seen.get("compute", 0) < self.started[node]:
            raise RaceError(f"the host reads a number of {node.name} without an event")
        self.run(self.compute, node)

    def launch(self, node: ir.Node) -> None:
        if definition_of(node) is WAIT:
            if node is not self.without:
                assert node.inputs[0] is not None
                self.compute.wait(self.collectives, self.computed.get(node.inputs[0], ("", 0))[1])
            self.run(self.compute, node)
        elif any(definition_of(user) is WAIT and index == 0 for v in node.outputs for user, index in v.uses()):
            self.collectives.wait(self.compute, self.compute.done)
            self.run(self.collectives, node)
        else:
            self.run(self.compute, node)


def simulate(part: Part, steps: Iterable[Step], without: ir.Node | None = None) -> None:
    """Run steps; `without`: the event is removed that this wait or early read waits for.

    Raises:
        RaceError: a value is read before its stream has computed it, as far as the reader knows.
    """
    device = _Device(part, without)
    actions = {Phase.START_READ: device.start_read, Phase.FINISH_READ: device.finish_read, Phase.RUN: device.launch}
    for node, phase in steps:
        actions[phase](node)
