"""The content of the page as plain values: the command measures them, the template renders them."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.onnx_file import without_case_suffix
from onnxtrain.report import CompileReport, PassReport

_OPS_OF_A_BAR = 12


@dataclass(frozen=True)
class NodeRow:
    """A node of a graph, with its module and source location, and whether it belongs to backward."""

    module: str
    op: str
    domain: str
    name: str
    outputs: str
    line: str
    is_backward: bool


@dataclass(frozen=True)
class GraphTable:
    """A graph as rows, grouped by module in order of first appearance."""

    title: str
    nodes: tuple[NodeRow, ...]

    def by_module(self) -> list[tuple[str, list[NodeRow]]]:
        rows: dict[str, list[NodeRow]] = defaultdict(list)
        for node in self.nodes:
            rows[node.module].append(node)
        return list(rows.items())

    def count(self, op: str) -> int:
        return sum(node.op == op for node in self.nodes)


@dataclass(frozen=True)
class NodeTime:
    """The time of a node in a step, in milliseconds."""

    op: str
    module: str
    ms: float


@dataclass(frozen=True)
class Steps:
    """The step times of one implementation, in milliseconds; implementations ran interleaved."""

    name: str
    ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


@dataclass(frozen=True)
class ModelReport:
    """The content of the page.

    Attributes:
        name: of the model.
        about: short facts, as (heading, value).
        compiled: the report of the compilation's stages.
        captured: the graph as PyTorch exported it.
        executed: the graph that runs, with backward.
        times: of the nodes, in a real step.
        eager: PyTorch's step times.
        ours: the graph's step times.
        verdict: the result of `verify`, in words.
        is_right: whether `verify` passed.
        memory: the memory of a step, as HTML with an SVG chart; "" without.
    """

    name: str
    about: tuple[tuple[str, str], ...]
    compiled: CompileReport
    captured: GraphTable
    executed: GraphTable
    times: tuple[NodeTime, ...]
    eager: Steps
    ours: Steps
    verdict: str
    is_right: bool
    memory: str = ""

    @property
    def step_ms(self) -> float:
        """The total time of all nodes."""
        return sum(time.ms for time in self.times)

    def passes(self) -> list[tuple[str, PassReport]]:
        """Return the passes that applied or refused something, with their stage."""
        return [(s.name, p) for s in self.compiled.stages for p in s.passes if p.applied or p.refused]

    def idle(self) -> list[str]:
        """Return the passes without matches."""
        busy = {p.name for _, p in self.passes()}
        return list(dict.fromkeys(p.name for s in self.compiled.stages for p in s.passes if p.name not in busy))

    def other_stages(self) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
        """Return the stages without passes that applied or refused something."""
        stages = (s for s in self.compiled.stages if not s.passes and (s.applied or s.refused))
        return [(stage.name, stage.applied, tuple(map(str, stage.refused))) for stage in stages]

    def op_changes(self) -> list[tuple[str, int, int]]:
        """Return the count of each op in the captured and in the executed graph; ops whose counts differ come first."""
        ops = sorted({n.op for n in (*self.captured.nodes, *self.executed.nodes)})
        rows = [(op, self.captured.count(op), self.executed.count(op)) for op in ops]
        return sorted(rows, key=lambda row: (row[1] == row[2], -row[1] - row[2], row[0]))

    def time_by_op(self) -> list[tuple[str, float, int]]:
        """Return (op, milliseconds, count), the slowest first."""
        return _summed((time.op, time.ms) for time in self.times)[:_OPS_OF_A_BAR]

    def time_by_module(self) -> list[tuple[str, float, int]]:
        """Return (module, milliseconds, count), the slowest first. Equal layers of a list share one row, `layer.*`."""
        return _summed((re.sub(r"\.\d+(?=\.|$)", ".*", t.module) or "the model", t.ms) for t in self.times)


def _summed(times: Iterable[tuple[str, float]]) -> list[tuple[str, float, int]]:
    total: dict[str, list[float]] = defaultdict(list)
    for name, ms in times:
        total[name].append(ms)
    return sorted(((name, sum(ms), len(ms)) for name, ms in total.items()), key=lambda row: -row[1])


def counted(texts: Sequence[object]) -> list[tuple[str, int]]:
    """Count equal texts; each is returned once, with its count."""
    words = [str(text) for text in texts]
    return [(text, words.count(text)) for text in dict.fromkeys(words)]


def read_graph(title: str, file: Path) -> GraphTable:
    """Read a graph that a stage has written (the option save_graphs)."""
    return GraphTable(title, tuple(_rows(ir.load(file).graph)))


def _rows(graph: ir.Graph) -> Iterator[NodeRow]:
    for node in graph:
        props = node.metadata_props
        yield NodeRow(
            module=props.get("module", ""),
            op=without_case_suffix(node.op_type),
            domain=node.domain or "ai.onnx",
            name=node.name or "",
            outputs=", ".join(f"{v.name} {_shape(v)}" for v in node.outputs if v.name),
            line=re.sub(r"^.*[/\\]", "", props.get("line", "")),
            is_backward="gradient_of" in props,
        )


def _shape(value: ir.Value) -> str:
    kind = value.dtype.name.lower() if value.dtype is not None else ""
    return kind if value.shape is None else f"{kind}[{', '.join(map(str, sizes.dims_of(value)))}]"


def node_times(profile: torch.profiler.profile, ops: Iterable[str], steps: int) -> tuple[NodeTime, ...]:
    """Return the times of the nodes, from a profile over several steps.

    Args:
        profile: a stopped profiler.
        ops: the op types of the graph; the range of a node is named `<op> <module>`.
        steps: the number of profiled steps.
    """
    op_types, times = set(ops), []
    for event in profile.key_averages():
        op, _, module = event.key.partition(" ")
        if op in op_types:
            total = event.device_time_total or event.cpu_time_total
            count = max(1, round(event.count / steps))
            times += [NodeTime(op, module, total / 1e3 / steps / count)] * count
    return tuple(times)
