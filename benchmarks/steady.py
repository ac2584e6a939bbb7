"""The steady step: all variants interleaved in one process.

Each round gives one time of each variant, measured in the same state of the machine. So the ratio is taken round by
round, and its quartiles say how steady it is; who goes first changes with every round. The step's matrix products
alone are timed in the same rounds.

A turn is a step or, where that is short, as many as fill 10 ms, whose mean counts: after one step of another variant
all code and data are out of the caches, which costs as much as half of a step of 0.3 ms, and is not how anybody trains.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks import processes
from benchmarks.memory import peak_bytes
from benchmarks.other_programs import OtherPrograms
from benchmarks.peak import peak_flops
from benchmarks.processes import Tell
from benchmarks.products import Products, matrix_flops
from benchmarks.spent import parts, spent
from benchmarks.variants import EAGER, ONNXTRAIN, OWN, Stepper, make_batches, make_model
from benchmarks.workload import Batch, Workload
from benchmarks.workloads import WORKLOADS

# Enough steps, after the last compile, that each kernel of a choice of four is tried four times, and C++ programs
# and fused regions are compared.
_LEAST_WARM_UP = 24
_LEAST_WARM_UP_S = 4.0
_WARM_UP_OF_OTHERS = 5  # steps of those that change nothing while they run
_MOST_WARM_UP_OF_OTHERS_S = 60.0  # then those are enough that they have taken
_COMMON_STEPS = 1 + _WARM_UP_OF_OTHERS  # in which all variants see the same batches
_MOST_WARM_UP_S = 900.0  # a fused region takes some 6 s of a processor, and a model may have ten
_POLL_S = 0.2
_SHOW_EVERY_S = 1.0
_LEAST_TURN_S = 0.01
# Rounds end when they have taken that long: eager under autocast to bfloat16 takes 35 s a step on a processor without
# instructions for it. So many there are in any case; so are those that see a batch each.
_MOST_ROUNDS_S = 300.0
_LEAST_ROUNDS = 3


def measure(
    workload: Workload, variants: Sequence[str], rounds: int, tell: Tell, *, warm: bool = True
) -> dict[str, Any]:
    """Times `rounds` rounds; all but the first steps and the circumstances of a `Measured`."""
    batches = make_batches(workload)
    model = make_model(workload)
    products = None
    if not workload.cold and len(batches) == 1:
        eager = Stepper(workload, EAGER, model)
        products = Products(lambda: eager.step(batches[0]))
    steppers: dict[str, Stepper] = {}
    if not workload.cold:
        for variant in variants:
            tell(f"preparing {variant}")
            steppers[variant] = Stepper(workload, variant, model)
            steppers[variant].step(batches[0])
        if warm:
            warm_up(steppers, batches, tell)
    steps = _steps_of_a_turn(steppers, batches)
    others = OtherPrograms()
    times = _timed(workload, variants, model, steppers, batches, rounds, steps, products, tell)
    busy = others.cores()
    tell("measuring peak memory")
    largest = max(batches, key=workload.items, default={})
    peaks = {name: peak_bytes(lambda own=own: own.step(largest), workload.device) for name, own in steppers.items()}
    tell("profiling")
    profiled = _PROFILED if workload.device == "cpu" else ()
    looked_at = {n: own for n, own in steppers.items() if n in profiled}
    shares = parts(looked_at, largest, steps) if looked_at and not workload.cold else {}
    kinds = {n: spent(lambda own=own: own.step(largest)) for n, own in looked_at.items()}
    return {
        "items": sum(workload.items(batches[number % len(batches)]) for number in range(len(times[variants[0]]))),
        "turn": steps,
        "variants": [
            {
                "variant": n,
                "rounds_s": times[n],
                "peak_bytes": peaks[n],
                "losses": steppers[n].losses[:_COMMON_STEPS],
                "spent": [dataclasses.asdict(each) for each in kinds.get(n, ())],
                "parts_s": shares.get(n, {}),
            }
            for n in variants
        ],
        "products_s": times[_PRODUCTS],
        "products": products.count if products else 0,
        "products_flops": products.operations if products else 0,
        "kept": _kept(steppers, batches[0], products) if products else 1.0,
        "peak_flops": statistics.median(times[_PEAK]) if times[_PEAK] else None,
        "others_cores": busy,
    }


def _kept(steppers: dict[str, Stepper], batch: Batch, products: Products) -> float:
    """How much of the operations of eager's products onnxtrain's step has, where both are there."""
    eager, ours = steppers.get(EAGER), steppers.get(ONNXTRAIN)
    if eager is None or ours is None or not products.operations:
        return 1.0
    spared = matrix_flops(lambda: eager.step(batch)) - matrix_flops(lambda: ours.step(batch))
    return 1 - spared / products.operations


_PRODUCTS = "products alone"
_PEAK = "most operations a second"  # in each round too: a virtual processor's speed may halve from one to the next
_PROFILED = (EAGER, ONNXTRAIN)


def _timed(
    workload: Workload,
    variants: Sequence[str],
    model: Any,
    steppers: dict[str, Stepper],
    batches: Sequence[Batch],
    rounds: int,
    steps: int,
    products: Products | None,
    tell: Tell,
) -> dict[str, list[float]]:
    """The seconds of a step, in each round, by variant; those of the products; and what the processor made."""
    times: dict[str, list[float]] = {variant: [] for variant in (*variants, _PRODUCTS, _PEAK)}
    started = shown = time.monotonic()
    least = _LEAST_ROUNDS if len(batches) == 1 else rounds
    gc.collect()
    gc.disable()  # else a collection falls on whoever is running just then
    try:
        for number in range(rounds):
            first = number % len(variants)
            for variant in (*variants[first:], *variants[:first]):
                prepare_s = 0.0
                if variant not in steppers:  # cold: to prepare it is part of its first step
                    tell(f"first step of {variant}")
                    steppers[variant] = Stepper(workload, variant, model)
                    prepare_s = steppers[variant].prepare_s
                batch = batches[number % len(batches)]
                turn = [steppers[variant].step(batch) for _ in range(steps)]
                times[variant].append(prepare_s + statistics.mean(turn))
            if products is not None and products.count:
                times[_PRODUCTS].append(statistics.mean(products.run() for _ in range(steps)))
                if workload.device == "cpu" and (peak := peak_flops()) is not None:
                    times[_PEAK].append(peak)
            now = time.monotonic()
            if number + 1 >= least and now - started > _MOST_ROUNDS_S:
                break
            if now - shown > _SHOW_EVERY_S:
                shown = now
                tell(f"round {number + 1} of {rounds}")
    finally:
        gc.enable()
    return times


def _steps_of_a_turn(steppers: dict[str, Stepper], batches: Sequence[Batch]) -> int:
    """As many as fill a turn of whoever is fastest; one where only first steps are timed."""
    if not steppers:
        return 1
    fastest = min(stepper.step(batches[0]) for _ in range(3) for stepper in steppers.values())
    return math.ceil(_LEAST_TURN_S / fastest)


def warm_up(steppers: dict[str, Stepper], batches: Sequence[Batch], tell: Tell) -> None:
    """Steps until onnxtrain has chosen its kernels and whatever it compiles behind them is there."""
    tell("warming up")
    started = time.monotonic()
    count = since_compiling = 0
    while (taken := time.monotonic() - started) < _MOST_WARM_UP_S:
        since_compiling = 0 if is_compiling() else since_compiling + 1
        if since_compiling == 0 and count > _LEAST_WARM_UP:  # what is compiled is asked for by now
            time.sleep(_POLL_S)
            continue
        enough = count >= len(batches) and taken >= _LEAST_WARM_UP_S
        if enough and since_compiling > _LEAST_WARM_UP:
            return
        for variant, stepper in steppers.items():
            if variant in OWN or (count < _WARM_UP_OF_OTHERS and taken < _MOST_WARM_UP_OF_OTHERS_S):
                stepper.step(batches[count % len(batches)])
        count += 1


def is_compiling() -> bool:
    """Whether a compiler, or anything else, runs as a child of this process and has work to do."""
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
