"""Plain values in which each stage says what it did, what it refused and why; `observe` renders them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Refusal:
    """A change that a pass could have made to a node but did not.

    Attributes:
        pass_name: the pass.
        node: the node's name.
        reason: why, as a sentence without its full stop.
        where: the user's module and line that the node comes from; "" where they are not known.
    """

    pass_name: str
    node: str
    reason: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.node}: {self.reason}"


@dataclass(frozen=True)
class PassReport:
    """What one pass took, the changes that it made, as sentences, and those that it refused."""

    name: str
    took_ms: float
    applied: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Work:
    """What one run of a graph takes, at the sizes of one call.

    Attributes:
        flops: floating-point operations.
        bytes: what its nodes read and write in memory; a view reads and writes nothing.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class SubgraphReport:
    """Activations that can be computed again instead of kept.

    Attributes:
        pattern: the operators that compute one, each with "+" behind it.
        frequency: how many such activations there are.
        saved_bytes: what is kept less when all of them are computed again, at the sizes of the first call.
        recomputed: how many of them are.
        config: what computes all of them again, for the option memory_opt_config.
    """

    pattern: str
    frequency: int
    saved_bytes: int
    recomputed: int
    config: str

    @property
    def status(self) -> str:
        return f"{self.recomputed} of {self.frequency} computed again" if self.recomputed else "kept"


@dataclass(frozen=True)
class StageReport:
    """What one stage of the pipeline did: its time, the nodes of its graph, changes made and refused, its passes.

    That of planning has the subgraphs that memory_opt_config can name, where one of its options is set. `work` is what
    its graph takes, under the option count_work.
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
    """One compilation.

    Attributes:
        stages: in order.
        before: under the option count_work, what a step would take as it was captured, with its backward and no pass.
        variants: other graphs of the same capture by what is special about them ("without padding"). They come when
            the first batch for them does.
    """

    stages: tuple[StageReport, ...] = ()
    before: Work | None = None
    variants: Mapping[str, CompileReport] = field(default_factory=dict)

    @property
    def took_ms(self) -> float:
        """The time of all stages together."""
        return sum(stage.took_ms for stage in self.stages)

    @property
    def after(self) -> Work | None:
        """Under the option count_work, what a step takes that runs the last graph."""
        return next((stage.work for stage in reversed(self.stages) if stage.work is not None), None)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """The refusals of all stages."""
        return tuple(refusal for stage in self.stages for refusal in stage.refused)

    @property
    def subgraphs(self) -> tuple[SubgraphReport, ...]:
        """The subgraphs that memory_opt_config can name; () where none of its options is set."""
        return tuple(subgraph for stage in self.stages for subgraph in stage.subgraphs)


@dataclass(frozen=True)
class Region:
    """A module whose forward runs as ONNX graphs.

    Attributes:
        name: its qualified name; "" is the model itself.
        kind: its class.
        shares: whether its newest graph is one that was compiled for another region.
        compiled: what the stages did; None before its first call, and where it runs in PyTorch.
    """

    name: str
    kind: str
    shares: bool = False
    compiled: CompileReport | None = None


@dataclass(frozen=True)
class PrepareReport:
    """How a model was prepared: as a whole or block by block, why, and its regions."""

    by_block: bool
    why: str
    regions: tuple[Region, ...]

    def __str__(self) -> str:
        how = "block by block" if self.by_block else "as a whole"
        lines = [f"prepared {how}: {self.why}"]
        for region in self.regions:
            found = region.compiled
            state = "no graph" if found is None else "shares a graph" if region.shares else f"{found.took_ms:.0f} ms"
            lines.append(f"  {region.name or 'the model'} ({region.kind}): {state}")
        return "\n".join(lines)
