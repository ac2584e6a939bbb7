"""Time onnxtrain's kernels for a GPU against the operators that they replace, interleaved.

    softmax and loss of a chunk of logits, with the gradient      row_kernel.py      PyTorch's operators
    three matmuls with a vocabulary that is not aligned           padded             as they are

Usage: python -m benchmarks.gpu_kernels [--rounds N]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine, measured_commit
from onnxtrain.ops.loss.row_losses import rows_by_pytorch, run_kernel
from onnxtrain.ops.matmul.aligned import missing, padded_gemm

Run = Callable[[], object]
_VOCABULARY, _WIDTH, _TOKENS = 50257, 768, 4096  # GPT-2's
_WARM_UP = 3


def _cross_entropy() -> Iterator[tuple[str, Run, Run]]:
    columns = _VOCABULARY + missing(_VOCABULARY)
    for rows in (512, _TOKENS):
        logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
        labels = torch.randint(_VOCABULARY, (rows,), device="cuda")
        factors = torch.rand(rows, device="cuda")
        yield (
            f"cross entropy and gradient of [{rows}, {_VOCABULARY}], bfloat16",
            functools.partial(run_kernel, logits, _VOCABULARY, labels, factors),
            functools.partial(rows_by_pytorch, logits, _VOCABULARY, labels, factors, torch.float32),
        )


def _vocabulary() -> Iterator[tuple[str, Run, Run]]:
    extra = missing(_VOCABULARY)
    shapes = ((_TOKENS, _WIDTH), (_VOCABULARY, _WIDTH), (_TOKENS, _VOCABULARY))
    x, w, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    matmuls = {
        "logits": (x, w.t(), (0, 0, extra)),
        "gradient of the hidden states": (dy, w, (0, extra, 0)),
        "gradient of the weight": (dy.t(), x, (extra, 0, 0)),
    }
    for name, (a, b, padding) in matmuls.items():
        yield (
            f"{name}, {_TOKENS} x {_WIDTH} x {_VOCABULARY}, bfloat16",
            functools.partial(padded_gemm, a, b, None, *padding),
            functools.partial(torch.mm, a, b),
        )


def _timed(runs: Sequence[Run], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each, by CUDA events, in interleaved rounds."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(_WARM_UP + rounds):
        for run, of_run in zip(runs, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(100_000)  # the host launches all of the run while the GPU waits
            begin.record()
            run()
            end.record()
            end.synchronize()
            if number >= _WARM_UP:
                of_run.append(begin.elapsed_time(end))
    return times


def _quartiles(times: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main(arguments: Sequence[str]) -> int:
    """Print a table: milliseconds, median and quartiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    console = Console(width=150)
    if not torch.cuda.is_available():
        console.print("benchmarks.gpu_kernels: no CUDA device, so there is nothing to time.")
        return 1
    table = Table("computation", "onnxtrain, ms", "replaces, ms", "times as fast", title="median (quartiles)")
    for cases in (_cross_entropy, _vocabulary):
        for name, own, other in cases():
            mine, theirs = _timed((own, other), options.rounds)
            ratio = statistics.median(their / my for my, their in zip(mine, theirs, strict=True))
            table.add_row(name, _quartiles(mine), _quartiles(theirs), f"{ratio:.2f}")
    console.print(f"{describe_machine().gpu}, commit {measured_commit()}, torch {torch.__version__}")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
