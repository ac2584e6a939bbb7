"""The results of a measurement as plain values, stored as JSON files.

    <folder>/<workload>.json      Measured        <folder>/background.json      BackgroundCompilation

Each file holds one run, with the machine and the command. Ratios are only taken within a file.
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
from benchmarks.op_times import OpTime
from benchmarks.other_programs import MAX_OTHERS_CORES
from benchmarks.variants import EAGER, ONNXTRAIN

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Circumstances:
    """The machine and time of a run, and the load of other programs.

    Attributes:
        others_cores: the number of cores that other programs kept busy during the timed rounds.
        commit: the measured commit, with `+` if files had uncommitted changes; "" outside a repository.
    """

    machine: Machine
    command: str
    date: str
    others_cores: float
    commit: str = ""

    @property
    def disturbed(self) -> bool:
        return self.others_cores > MAX_OTHERS_CORES


@dataclass(frozen=True)
class Rounds:
    """One variant's time in each round, in seconds."""

    variant: str
    rounds_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def quartiles_s(self) -> Quartiles:
        return quartiles(self.rounds_s)

    @property
    def total_s(self) -> float:
        return sum(self.rounds_s)


@dataclass(frozen=True)
class Timed(Rounds):
    """All measurements of one variant.

    Attributes:
        first_s, second_s: the seconds of the first and second step in each fresh process.
        peak_bytes: the peak memory of a step.
        losses: of its first steps, for which all variants get the same batches.
        op_times: the time of a step by op; () if it was not profiled.
        parts_s: the time of a step by part of the training loop.
    """

    first_s: tuple[float, ...]
    second_s: tuple[float, ...]
    peak_bytes: int
    losses: tuple[float, ...]
    op_times: tuple[OpTime, ...] = ()
    parts_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_median_s(self) -> float | None:
        return statistics.median(self.first_s) if self.first_s else None


@dataclass(frozen=True)
class Measured:
    """The results of one run of one workload.

    Attributes:
        items: processed by a variant in all rounds.
        gemms_s: the seconds of the step's GEMMs and convolutions alone, in each round; () if unknown.
        gemms: the number of GEMMs and convolutions in a step.
        steps_per_round: the steps of a variant in a round; times are per step.
        gemm_flops: the FLOPs of these GEMMs and convolutions.
        gemm_fraction: the fraction of these FLOPs that onnxtrain's step has: it skips dead rows.
        peak_flops: the processor's peak FLOP/s, the median of all rounds; None if unknown.
        log: what onnxtrain logged about programs of Inductor and CUDA graphs.
    """

    workload: str
    circumstances: Circumstances
    items: int
    variants: tuple[Timed, ...]
    gemms_s: tuple[float, ...]
    gemms: int
    steps_per_round: int = 1
    gemm_flops: int = 0
    gemm_fraction: float = 1.0
    peak_flops: float | None = None
    log: tuple[str, ...] = ()

    def timed(self, variant: str) -> Timed | None:
        return next((timed for timed in self.variants if timed.variant == variant), None)

    def share(self, variant: Timed) -> float | None:
        """Return the fraction of a variant's step that its matmuls take at the best measured rate."""
        fraction = self.gemm_fraction if variant.variant == ONNXTRAIN else 1.0
        return fraction * statistics.median(self.gemms_s) / variant.median_s if self.gemms_s else None

    def later(self) -> tuple[float, ...]:
        """Return the seconds by which onnxtrain's first step takes longer than eager's, for each pair of processes."""
        ours, eager = self.timed(ONNXTRAIN), self.timed(EAGER)
        return () if ours is None or eager is None else tuple(map(sub, ours.first_s, eager.first_s))

    def limit(self) -> float | None:
        """Return the speedup over eager of a step that consists only of onnxtrain's GEMMs and convolutions."""
        eager = self.timed(EAGER)
        share = None if eager is None else self.share(eager)
        return 1 / (share * self.gemm_fraction) if share else None


def speed_over(fast: Rounds, slow: Rounds) -> Quartiles:
    """Return the speedup of `fast` over `slow`: lower quartile, median and upper quartile over the rounds."""
    return quartiles([s / f for s, f in zip(slow.rounds_s, fast.rounds_s, strict=True)])


def quartiles(ratios: Sequence[float]) -> Quartiles:
    """Return the lower quartile, the median and the upper quartile."""
    if len(ratios) == 1:
        return ratios[0], ratios[0], ratios[0]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


MAX_SLOWDOWN = 1.5  # of the median step while kernels compile
MAX_ABOVE_S = 0.3  # by which a single step may exceed this


@dataclass(frozen=True)
class BackgroundCompilation:
    """The seconds of steps by period: while kernels were compiled in the background, and with the compilers stopped."""

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
        """The slowdown of the median step of a period by the compilers: quartiles over the periods."""
        periods = zip(self.during_s, self.alone_s, strict=True)
        return quartiles([statistics.median(during) / statistics.median(alone) for during, alone in periods])

    @property
    def slowest_s(self) -> float:
        return max(itertools.chain(*self.during_s))

    @property
    def longest_above_s(self) -> float:
        """By how much the slowest step exceeds the limit for a median step, 1.5 times that of one alone."""
        return self.slowest_s - MAX_SLOWDOWN * self.alone_median_s


def write(result: Measured | BackgroundCompilation, folder: Path) -> Path:
    """Write one result, replacing an older one of the same workload; return the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "background" if isinstance(result, BackgroundCompilation) else result.workload
    path = folder / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8")
    return path


def read(folder: Path, names: Sequence[str]) -> list[Measured | BackgroundCompilation]:
    """Read the results of these names from a folder, in this order; missing ones are skipped."""
    paths = [folder / f"{name}.json" for name in names]
    return [from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def from_json(values: dict[str, Any]) -> Measured | BackgroundCompilation:
    """Build a result from the values that `write` stored."""
    circumstances = values["circumstances"]
    machine = circumstances["machine"]
    machine["versions"] = tuple((name, version) for name, version in machine["versions"])
    common = {"circumstances": Circumstances(**circumstances | {"machine": Machine(**machine)})}
    if "during_s" in values:
        return BackgroundCompilation(**_with_tuples(values) | common)
    variants = tuple(
        Timed(**_with_tuples(timed) | {"op_times": tuple(OpTime(**op_time) for op_time in timed.get("op_times", ()))})
        for timed in values["variants"]
    )
    return Measured(**_with_tuples(values) | common | {"variants": variants})


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _with_tuple(value) for name, value in values.items()}


def _with_tuple(value: Any) -> Any:
    return tuple(map(_with_tuple, value)) if isinstance(value, list) else value
