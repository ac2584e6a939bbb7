"""Plain values in which each stage says what it did, what it refused and why; `observe` renders them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A change that a pass could have made to a node but did not, and why."""

    pass_name: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.node}: {self.reason}"


@dataclass(frozen=True)
class PassReport:
    """What one pass took, and how many changes it made and refused."""

    name: str
    took_ms: float
    made: int
    refused: int


@dataclass(frozen=True)
class SubgraphReport:
    """Activations that can be computed again instead of kept.

    Attributes:
        pattern: the operators that compute one, each with "+" behind it.
        frequency: how many such activations there are.
        saved_bytes: what is kept less when all of them are computed again, at the sizes of the first call.
        computed_again: how many of them are.
        config: what computes all of them again, for the option memory_opt_config.
    """

    pattern: str
    frequency: int
    saved_bytes: int
    computed_again: int
    config: str

    @property
    def status(self) -> str:
        return f"{self.computed_again} of {self.frequency} computed again" if self.computed_again else "kept"


@dataclass(frozen=True)
class StageReport:
    """What one stage of the pipeline did: its time, the nodes of its graph, changes made and refused, its passes.

    That of planning has the subgraphs that memory_opt_config can name, where one of its options is set.
    """

    name: str
    took_ms: float
    nodes: int
    made: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    passes: tuple[PassReport, ...] = ()
    subgraphs: tuple[SubgraphReport, ...] = ()


@dataclass(frozen=True)
class CompileReport:
    """The stages of one compilation, in order."""

    stages: tuple[StageReport, ...] = ()

    @property
    def took_ms(self) -> float:
        """The time of all stages together."""
        return sum(stage.took_ms for stage in self.stages)

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
