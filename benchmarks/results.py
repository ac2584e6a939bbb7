"""What a measurement gave, as plain values that go to a JSON file and back.

    <folder>/<workload>.json      Measured        <folder>/behind.json      Behind

Each file holds one run, with the machine and the command: ratios are only taken within a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.other_programs import MOST
from benchmarks.spent import Spent
from benchmarks.variants import EAGER, ONNXTRAIN

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Circumstances:
    """Where, when and beside what a run took place.

    Attributes:
        others_cores: how many cores other programs kept busy during the timed rounds.
        commit: the commit that was measured, with `+` where files had changed since; empty outside a repository.
    """

    machine: Machine
    command: str
    date: str
    others_cores: float
    commit: str = ""

    @property
    def disturbed(self) -> bool:
        return self.others_cores > MOST


@dataclass(frozen=True)
class Rounds:
    """One variant's time in each round, in seconds."""

    variant: str
    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def total_s(self) -> float:
        return sum(self.rounds_s)


@dataclass(frozen=True)
class Timed(Rounds):
    """And the rest that is known of it.

    Attributes:
        first_s, second_s: its first and second step in each fresh process.
        peak_bytes: of a step.
        losses: of its first steps, for which all variants get the same batches.
        spent: what a step's time goes to; empty where that was not looked at.
        parts_s: the same by what the training loop does.
    """

    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    peak_bytes: int
    losses: tuple[float, ...]
    spent: tuple[Spent, ...] = ()
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_median_s(self) -> float | None:
        return statistics.median(self.first_s) if self.first_s else None


@dataclass(frozen=True)
class Measured:
    """What one run gave of one workload.

    Attributes:
        items: of all rounds of a variant.
        products_s: what the step's matrix products alone took, in each round; empty where that is not known.
        products: how many there are in a step.
        turn: steps of a variant per round; times are per step.
        products_flops: floating-point operations of these products.
        kept: how much of these operations onnxtrain's step has: it leaves out rows that nobody reads.
        peak_flops: those that the processor makes in a second at most, the median of all rounds; None where that is
            not known.
    """

    workload: str
    circumstances: Circumstances
    items: int
    variants: tuple[Timed, ...]
    products_s: tuple[float, ...]
    products: int
    turn: int = 1
    products_flops: int = 0
    kept: float = 1.0
    peak_flops: float | None = None

    def of(self, variant: str) -> Timed | None:
        return next((timed for timed in self.variants if timed.variant == variant), None)

    def share(self, variant: Timed) -> float | None:
        """The fraction of a variant's step that its matmuls take at the best measured rate."""
        kept = self.kept if variant.variant == ONNXTRAIN else 1.0
        return kept * statistics.median(self.products_s) / variant.median_s if self.products_s else None

    def later(self) -> tuple[float, ...]:
        """Seconds by which onnxtrain's first step takes longer than eager's, of each pair of processes."""
        ours, eager = self.of(ONNXTRAIN), self.of(EAGER)
        return () if ours is None or eager is None else tuple(map(sub, ours.first_s, eager.first_s))

    def limit(self) -> float | None:
        """How many times eager's speed a step of nothing but onnxtrain's products would have."""
        eager = self.of(EAGER)
        share = None if eager is None else self.share(eager)
        return 1 / (share * self.kept) if share else None


def speed_over(fast: Rounds, slow: Rounds) -> Quartiles:
    """How many times `slow`'s speed `fast` has: lower quartile, median and upper quartile over the rounds."""
    return quartiles([s / f for s, f in zip(slow.rounds_s, fast.rounds_s, strict=True)])


def quartiles(ratios: Sequence[float]) -> Quartiles:
    """The lower one, the median and the upper one."""
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


MOST_SLOWDOWN = 1.5  # of the median step, while kernels compile
MOST_ABOVE_S = 0.3  # that a single step may lie above this


@dataclass(frozen=True)
class Behind:
    """Steps in seconds by turns: while kernels were compiled behind them, and while compilers were held."""

    workload: str
    circumstances: Circumstances
    during_s: tuple[tuple[float, ...], ...]
    alone_s: tuple[tuple[float, ...], ...]
    compiling_s: float

    @property
    def during_median_s(self) -> float:
        return statistics.median(itertools.chain(*self.during_s))

    @property
    def alone_median_s(self) -> float:
        return statistics.median(itertools.chain(*self.alone_s))

    @property
    def slowdown(self) -> Quartiles:
        """How many times as long the median step of a turn takes with compilers: quartiles over the turns."""
        turns = zip(self.during_s, self.alone_s, strict=True)
        return quartiles([statistics.median(during) / statistics.median(alone) for during, alone in turns])

    @property
    def slowest_s(self) -> float:
        return max(itertools.chain(*self.during_s))

    @property
    def longest_above_s(self) -> float:
        """How much the slowest step during lies above the limit for a median step: 1.5 of one alone."""
        return self.slowest_s - MOST_SLOWDOWN * self.alone_median_s


def write(result: Measured | Behind, folder: Path) -> Path:
    """Writes one result, over an older one of the same workload; the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "behind" if isinstance(result, Behind) else result.workload
    path = folder / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path, names: Sequence[str]) -> list[Measured | Behind]:
    """The results of these names that are in a folder, in this order."""
    paths = [folder / f"{name}.json" for name in names]
    return [from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def from_json(values: dict[str, Any]) -> Measured | Behind:
    """What `write` wrote."""
    circumstances = values["circumstances"]
    machine = circumstances["machine"]
    machine["versions"] = tuple((name, version) for name, version in machine["versions"])
    common = {"circumstances": Circumstances(**circumstances | {"machine": Machine(**machine)})}
    if "during_s" in values:
        return Behind(**_with_tuples(values) | common)
    variants = tuple(
        Timed(**_with_tuples(timed) | {"spent": tuple(Spent(**each) for each in timed.get("spent", ()))})
        for timed in values["variants"]
    )
    return Measured(**_with_tuples(values) | common | {"variants": variants})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _with_tuple(value) for name, value in values.items()}


def _with_tuple(value: Any) -> Any:
    return tuple(map(_with_tuple, value)) if isinstance(value, list) else value
