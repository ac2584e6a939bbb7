"""Time steady-state steps of all variants, interleaved in one process.

Each round times every variant once, in the same state of the machine. Ratios are taken per round; their quartiles show
the noise. The order changes with every round. The GEMMs of the step alone are timed in the same rounds.

In a round each variant takes one step or, if steps are short, enough to fill 10 ms, of which the mean counts: a step of
another variant evicts all code and data from the caches, which costs up to half a step of 0.3 ms. Training does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks import processes
from benchmarks.gemms import Gemms, matmul_flops
from benchmarks.op_times import op_times, parts
from benchmarks.other_programs import OtherPrograms
from benchmarks.peak_flops import peak_flops
from benchmarks.peak_memory import peak_bytes
from benchmarks.processes import Tell
from benchmarks.variants import EAGER, INDUCTOR, ONNXTRAIN, OWN, Stepper, make_batches, make_model
from benchmarks.workload import Batch, Workload
from benchmarks.workloads import WORKLOADS
from onnxtrain.execute.inductor_program.program import MAKES_PROGRAMS

# Enough steps after the last compilation to time each of four candidate kernels four times, and to compare C++ programs
# and fused regions.
_MIN_WARM_UP = 24
_MIN_WARM_UP_S = 4.0
_WARM_UP_OF_OTHERS = 5  # steps of the variants that do not tune themselves
_MAX_WARM_UP_OF_OTHERS_S = 60.0  # after which, or after a quarter of the whole warm-up, theirs ends
_COMMON_STEPS = 1 + _WARM_UP_OF_OTHERS  # steps in which all variants see the same batches
_POLL_S = 0.2
_LOGGED = ("Inductor", "cuda_graphs", "CUDA graph")
_SHOW_EVERY_S = 1.0
_MIN_ROUND_S = 0.01
# No round starts after this time: eager under autocast to bfloat16 takes 35 s a step on a processor without
# instructions for it. The minimum number of rounds is run in any case, and so are the rounds of workloads with several
# batches.
_MAX_ROUNDS_S = 300.0
_MIN_ROUNDS = 3


def measure(
    workload: Workload, variants: Sequence[str], rounds: int, tell: Tell, *, warm: bool = True
) -> dict[str, Any]:
    """Time `rounds` rounds. Returns the fields of a `Measured` without its first steps and circumstances."""
    batches = make_batches(workload)
    model = make_model(workload)
    gemms = None
    if not workload.cold and len(batches) == 1:
        eager = Stepper(workload, EAGER, model)
        gemms = Gemms(lambda: eager.step(batches[0]))
    steppers: dict[str, Stepper] = {}
    log: list[str] = []
    if not workload.cold:
        with _logged() as log:
            for variant in variants:
                tell(f"preparing {variant}")
                steppers[variant] = Stepper(workload, variant, model)
                # Inductor compiles whole programs while the variants after this one are prepared.
                for number in range(_MIN_WARM_UP if warm and variant == INDUCTOR else 1):
                    steppers[variant].step(batches[max(number - 1, 0) % len(batches)])
            if warm:
                warm_up(steppers, batches, tell, workload.max_warm_up_s)
    steps = _steps_per_round(steppers, batches)
    others = OtherPrograms()
    times = _timed(workload, variants, model, steppers, batches, rounds, steps, gemms, tell)
    busy = others.cores()
    tell("measuring peak memory")
    largest = max(batches, key=workload.items, default={})
    peaks = {name: peak_bytes(lambda own=own: own.step(largest), workload.device) for name, own in steppers.items()}
    tell("profiling")
    profiled = _PROFILED if workload.device == "cpu" else ()
    in_profile = {n: own for n, own in steppers.items() if n in profiled}
    shares = parts(in_profile, largest, steps) if in_profile and not workload.cold else {}
    times_of_ops = {n: op_times(lambda own=own: own.step(largest)) for n, own in in_profile.items()}
    return {
        "items": sum(workload.items(batches[number % len(batches)]) for number in range(len(times[variants[0]]))),
        "steps_per_round": steps,
        "variants": [
            {
                "variant": n,
                "rounds_s": times[n],
                "peak_bytes": peaks[n],
                "losses": steppers[n].losses[:_COMMON_STEPS],
                "op_times": [dataclasses.asdict(op_time) for op_time in times_of_ops.get(n, ())],
                "parts_s": shares.get(n, {}),
            }
            for n in variants
        ],
        "gemms_s": times[_GEMMS],
        "gemms": gemms.count if gemms else 0,
        "gemm_flops": gemms.flops if gemms else 0,
        "gemm_fraction": _gemm_fraction(steppers, batches[0], gemms) if gemms else 1.0,
        "peak_flops": statistics.median(times[_PEAK]) if times[_PEAK] else None,
        "others_cores": busy,
        "log": log,
    }


def _gemm_fraction(steppers: dict[str, Stepper], batch: Batch, gemms: Gemms) -> float:
    """Return the GEMM FLOPs of onnxtrain's step as a fraction of eager's; 1 if one of the two is not measured."""
    eager, ours = steppers.get(EAGER), steppers.get(ONNXTRAIN)
    if eager is None or ours is None or not gemms.flops:
        return 1.0
    skipped = matmul_flops(lambda: eager.step(batch)) - matmul_flops(lambda: ours.step(batch))
    return 1 - skipped / gemms.flops


_GEMMS = "GEMMs alone"
_PEAK = "peak FLOP/s"  # in each round too: the speed of a virtual processor may halve from one to the next
_PROFILED = (EAGER, ONNXTRAIN)


def _timed(
    workload: Workload,
    variants: Sequence[str],
    model: Any,
    steppers: dict[str, Stepper],
    batches: Sequence[Batch],
    rounds: int,
    steps: int,
    gemms: Gemms | None,
    tell: Tell,
) -> dict[str, list[float]]:
    """Return the seconds of a step in each round, by variant.

    Those of the GEMMs alone; and the processor's peak FLOP/s.
    """
    times: dict[str, list[float]] = {variant: [] for variant in (*variants, _GEMMS, _PEAK)}
    started = shown = time.monotonic()
    least = _MIN_ROUNDS if len(batches) == 1 else rounds
    gc.collect()
    gc.disable()  # a collection would be charged to the variant that is running
    try:
        for number in range(rounds):
            first = number % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                prepare_s = 0.0
                if variant not in steppers:  # cold: preparation is part of the first step
                    tell(f"first step of {variant}")
                    steppers[variant] = Stepper(workload, variant, model)
                    prepare_s = steppers[variant].prepare_s
                batch = batches[number % len(batches)]
                seconds = [steppers[variant].step(batch) for _ in range(steps)]
                times[variant].append(prepare_s + statistics.mean(seconds))
            if gemms is not None and gemms.count:
                times[_GEMMS].append(statistics.mean(gemms.run() for _ in range(steps)))
                if workload.device == "cpu" and (peak := peak_flops()) is not None:
                    times[_PEAK].append(peak)
            now = time.monotonic()
            if number + 1 >= least and now - started > _MAX_ROUNDS_S:
                break
            if now - shown > _SHOW_EVERY_S:
                shown = now
                tell(f"round {number + 1} of {rounds}")
    finally:
        gc.enable()
    return times


def _steps_per_round(steppers: dict[str, Stepper], batches: Sequence[Batch]) -> int:
    """Return the steps of a variant in a round: enough to fill the minimum time with the fastest variant; 1 if cold."""
    if not steppers:
        return 1
    fastest = math.inf
    for _ in range(3):
        fastest = min(fastest, *(stepper.step(batches[0]) for stepper in steppers.values()))
        if fastest > 10 * _MIN_ROUND_S:  # no doubt that one step is enough, and each may take seconds
            break
    return math.ceil(_MIN_ROUND_S / fastest)


def warm_up(steppers: dict[str, Stepper], batches: Sequence[Batch], tell: Tell, max_s: float) -> None:
    """Run steps until onnxtrain has chosen its kernels and its background compilation is done."""
    tell("warming up")
    max_of_others_s = min(_MAX_WARM_UP_OF_OTHERS_S, max_s / 4)
    started = time.monotonic()
    count = since_compiling = 0
    while (taken := time.monotonic() - started) < max_s:
        since_compiling = 0 if is_compiling() else since_compiling + 1
        if since_compiling == 0 and count > _MIN_WARM_UP:  # by now all compilations have been requested
            time.sleep(_POLL_S)
            continue
        enough = count >= len(batches) and taken >= _MIN_WARM_UP_S
        if enough and since_compiling > _MIN_WARM_UP:
            return
        for variant, stepper in steppers.items():
            if variant in OWN or (count < _WARM_UP_OF_OTHERS and taken < max_of_others_s):
                stepper.step(batches[count % len(batches)])
        count += 1


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect what onnxtrain logs about Inductor and CUDA graphs: the programs that they run, and why no others."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if any(word in text for word in _LOGGED) and text not in lines:
                lines.append(text)

    logger, handler = logging.getLogger("onnxtrain"), Handler(logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def is_compiling() -> bool:
    """Return whether a child of this process, such as a compiler, or a thread that makes programs is running."""
    if any(thread.name.startswith(MAKES_PROGRAMS) for thread in threading.enumerate()):
        return True
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP, psutil.STATUS_STOPPED):
                return True
        except psutil.NoSuchProcess:
            continue
    return False


def _main(workload: str, rounds: str, warm: str, *variants: str) -> None:
    result = measure(
        WORKLOADS[workload],
        variants,
        int(rounds),
        lambda text: processes.send(doing=text),
        warm=warm == "warm",
    )
    processes.send(result=result)


if __name__ == "__main__":
    processes.end_on_termination()
    _main(*sys.argv[1:])
