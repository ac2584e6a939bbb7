"""Reports of the pipeline as plain values: what each stage applied, what it refused and why. `observe` renders them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Refusal:
    """A rewrite that a pass considered for a node and refused.

    Attributes:
        pass_name: the pass.
        node: the node's name.
        reason: why, as a sentence without its full stop.
        where: the module and source location that the node comes from; "" if unknown.
    """

    pass_name: str
    node: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.node}: {self.reason}"


@dataclass(frozen=True)
class PassReport:
    """One pass: its time, the changes that it applied, as sentences, and those that it refused."""

    name: str
    took_ms: float
    applied: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Work:
    """The cost of one run of a graph at the sizes of one call.

    Attributes:
        flops: floating-point operations.
        bytes: bytes that its nodes read from and write to memory; views count as none.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class SubgraphReport:
    """Activations of one kind that backward can recompute instead of keeping.

    Attributes:
        pattern: the operators that compute one, each followed by "+".
        frequency: the number of such activations.
        saved_bytes: the memory saved when all of them are recomputed, at the sizes of the first call.
        recomputed: how many of them are recomputed now.
        config: the entry of the option recompute that recomputes all of them.
    """

    pattern: str
    frequency: int
    saved_bytes: int
    recomputed: int
    config: str

    @property
    def status(self) -> str:
        return f"{self.recomputed} of {self.frequency} recomputed" if self.recomputed else "kept"


@dataclass(frozen=True)
class StageReport:
    """One stage of the pipeline: its time, the nodes of its graph, changes applied and refused, its passes.

    `subgraphs` lists what the option recompute can name; only the plan stage has it, and only if recompute is set.
    `work` is the cost of the stage's graph, if statistics has "work".
    """

    name: str
    took_ms: float
    nodes: int
    applied: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    passes: tuple[PassReport, ...] = ()
    subgraphs: tuple[SubgraphReport, ...] = ()
    work: Work | None = None


@dataclass(frozen=True)
class CompileReport:
    """The report of one compilation.

    Attributes:
        stages: the stages, in order.
        before: the cost of a step before any pass, with its backward, if statistics has "work".
        variants: further graphs of the same capture by name ("without padding"). Each is compiled when its first batch
            arrives.
    """

    stages: tuple[StageReport, ...] = ()
    before: Work | None = None
    variants: Mapping[str, CompileReport] = field(default_factory=dict)

    @property
    def took_ms(self) -> float:
        """The total time of all stages."""
        return sum(stage.took_ms for stage in self.stages)

    @property
    def after(self) -> Work | None:
        """The cost of a step of the final graph, if statistics has "work"."""
        return next((stage.work for stage in reversed(self.stages) if stage.work is not None), None)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """The refusals of all stages."""
        return tuple(refusal for stage in self.stages for refusal in stage.refused)

    @property
    def subgraphs(self) -> tuple[SubgraphReport, ...]:
        """The subgraphs that the option recompute can name; () if it is not set."""
        return tuple(subgraph for stage in self.stages for subgraph in stage.subgraphs)


@dataclass(frozen=True)
class Region:
    """A module whose forward runs as ONNX graphs.

    Attributes:
        name: its qualified name; "" is the model itself.
        class_name: its class.
        shares_graph: whether its newest graph was compiled for another region.
        compiled: the report of its compilation; None before its first call, or if it runs in PyTorch.
    """

    name: str
    class_name: str
    shares_graph: bool = False
    compiled: CompileReport | None = None


@dataclass(frozen=True)
class PrepareReport:
    """How a model was prepared: as a whole or block by block, the reason, and its regions."""

    by_block: bool
    reason: str
    regions: tuple[Region, ...]

    def __str__(self) -> str:
        mode = "block by block" if self.by_block else "as a whole"
        lines = [f"prepared {mode}: {self.reason}"]
        for region in self.regions:
            report = region.compiled
            if report is None:
                state = "no graph"
            else:
                state = "shares a graph" if region.shares_graph else f"{report.took_ms:.0f} ms"
            lines.append(f"  {region.name or 'the model'} ({region.class_name}): {state}")
        return "\n".join(lines)
