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
class StageReport:
    """What one stage of the pipeline did: its time, the nodes of its graph, changes made and refused."""

    name: str
    took_ms: float
    nodes: int
    made: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()


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
