"""Overlap of DistributedDataParallel's exchange with backward: two processes over gloo, 20 ms of delay per bucket.

    python -m benchmarks.ddp_overlap

Prints when the first and the last all-reduce begin, as fractions of backward, and the seconds of a step: without delay,
with it, and the sum of the former and all delays (medians). ORTModule, without early gradients, and eager take turns.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onnxtrain import ORTModule

WORLD, LAYERS, WIDTH, ROWS, DELAY_S, STEPS, WARM_UP = 2, 12, 256, 2048, 0.02, 12, 5
SUBJECTS: dict[str, Any] = {
    "onnxtrain": lambda module: ORTModule(module, rng="torch"),
    "early_gradients=False": lambda module: ORTModule(module, rng="torch", early_gradients=False),
    "eager": lambda module: module,
}


class Exchange:
    """A communication hook that reduces one bucket at a time in another thread, each after a delay."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.began: list[float] = []
        self._link = ThreadPoolExecutor(1)

    def __call__(self, bucket: Any) -> Any:
        self.began.append(time.perf_counter())
        future: Any = torch.futures.Future()
        self._link.submit(self._reduce, bucket.buffer(), future)
        return future

    def _reduce(self, buffer: torch.Tensor, future: Any) -> None:
        time.sleep(self.delay_s)
        dist.all_reduce(buffer.div_(WORLD))
        future.set_result(buffer)


def distributed(module: nn.Module, exchange: Exchange) -> nn.Module:
    parallel = DistributedDataParallel(module, bucket_cap_mb=0.25)
    parallel.register_comm_hook(None, lambda _, bucket: exchange(bucket))  # DDP rejects an annotation that is a string
    return parallel


def step(parallel: nn.Module, exchange: Exchange, delay_s: float) -> tuple[float, float, float]:
    """Return the seconds of a step, and the begin of the first and the last all-reduce as fractions of backward."""
    exchange.delay_s = delay_s
    exchange.began.clear()
    dist.barrier()
    start = time.perf_counter()
    loss = parallel(torch.randn(ROWS, WIDTH)).square().mean()
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    first, last = ((t - begin) / (end - begin) for t in (exchange.began[0], exchange.began[-1]))
    return end - start, first, last


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    modules = {}
    for name, wrap in SUBJECTS.items():
        torch.manual_seed(0)
        layers = (layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        exchange = Exchange()
        modules[name] = distributed(wrap(nn.Sequential(*layers)), exchange), exchange
    results: dict[tuple[str, float], list[tuple[float, float, float]]] = {}
    for number in range(STEPS):
        for name, (parallel, exchange) in modules.items():
            for delay_s in (0.0, DELAY_S):
                result = step(parallel, exchange, delay_s)
                if number >= WARM_UP:
                    results.setdefault((name, delay_s), []).append(result)
    for name, (_, exchange) in modules.items():
        free, first, last = map(statistics.median, zip(*results[name, 0.0], strict=True))
        delayed = statistics.median(seconds for seconds, _, _ in results[name, DELAY_S])
        in_turn = free + DELAY_S * len(exchange.began)
        if rank == 0:
            print(
                f"{name}: first {first:.2f}, last {last:.2f}; step {free:.3f} s, "
                f"delayed {delayed:.3f} s of {in_turn:.3f} s"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (f"{folder}/store",), WORLD, start_method="spawn")
