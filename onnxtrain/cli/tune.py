"""`onnxtrain tune`: the measured times of kernels on this machine, in a table; and measuring them in advance."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from onnxtrain.errors import OptionError
from onnxtrain.execute.kernel_choice.stored import file_of, load, save, setting
from onnxtrain.execute.kernel_choice.times import Answers
from onnxtrain.execute.kernel_choice.tuned import answers_in
from onnxtrain.module import ORTModule
from onnxtrain.observe.logs import only_errors
from onnxtrain.options import Options

Shape = tuple[int, int, int]  # rows, inputs and outputs of a linear layer

_HIDDEN = (384, 768, 1024)
_ROWS = (512, 2048)
COMMON: tuple[Shape, ...] = tuple(
    (rows, *sides) for rows in _ROWS for h in _HIDDEN for sides in ((h, h), (h, 4 * h), (4 * h, h))
)
_MOST_STEPS = 60  # on a busy machine few of them count
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def table(answers: Answers) -> Table:
    """The answers for a terminal: one row each."""
    result = Table(header_style="bold")
    for column in ("operator, element type, sizes", "measured at", "times", "choice"):
        result.add_column(column, overflow="fold")
    for question, answer in sorted(answers.items()):
        ordered = sorted(answer.samples.items(), key=lambda pair: pair[1].seconds)
        times = ", ".join(f"{name} {_time(samples.seconds)}" for name, samples in ordered)
        result.add_row(*(text.replace("[", r"\[") for text in (question, answer.sizes, times, answer.choice)))
    return result


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 0.01 else f"{seconds * 1e3:.1f} ms"


@only_errors()
def fill(shape: Shape, dtype: torch.dtype, folder: Path | None) -> bool:
    """Runs steps of a linear layer until its kernels are chosen; whether they are.

    In a folder of its own first: what is known at other sizes would leave candidates out.
    """
    with tempfile.TemporaryDirectory() as scratch:
        apart = file_of(Path(scratch))
        settled = _run(shape, dtype, apart.parent, answers_in(apart))
        save(file_of(folder), answers_in(apart))
    return settled


def _run(shape: Shape, dtype: torch.dtype, folder: Path, answers: Answers) -> bool:
    rows, inputs, outputs = shape
    module = ORTModule(torch.nn.Linear(inputs, outputs, dtype=dtype), tuning=True, tuning_results_path=folder)
    x = torch.randn(rows, inputs).to(dtype).requires_grad_()
    cotangent = torch.randn(rows, outputs).to(dtype)
    for number in range(_MOST_STEPS):
        module(x).backward(cotangent)
        if number and all(answer.choice for answer in answers.values()):  # the first step tries nothing
            return True
    return False


def _read_shape(text: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise OptionError(
            "The sizes of a linear layer cannot be read.",
            "onnxtrain tune --shapes",
            "ROWSxINPUTSxOUTPUTS, such as 2048x384x1536",
            text,
            "Give three numbers from 1 up.",
        )
    rows, inputs, outputs = map(int, text.split("x"))
    return rows, inputs, outputs


def clear(folder: Path | None) -> Path | None:
    """Removes this machine's file; gives its path where there was one."""
    file = file_of(folder)
    if not file.exists():
        return None
    file.unlink()
    return file


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--fill", action="store_true", help="measure linear layers of common sizes now")
    what.add_argument("--shapes", nargs="+", metavar="ROWSxINPUTSxOUTPUTS", help="measure linear layers of these sizes")
    what.add_argument("--clear", action="store_true", help="forget what was measured on this machine")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="what to measure (default: float32)")
    parser.add_argument("--folder", type=Path, help="where the times are (default: as in training)")


def run(options: argparse.Namespace) -> int:
    console = Console()
    folder = options.folder or Options.resolve().tuning_results_path
    if options.clear:
        removed = clear(folder)
        console.print(f"removed {removed}" if removed else f"there was nothing in {file_of(folder)}", markup=False)
        return 0
    shapes = COMMON if options.fill else tuple(map(_read_shape, options.shapes or ()))
    for shape in track(shapes, "measuring", console=console, disable=not shapes):
        if not fill(shape, _DTYPES[options.dtype], folder):
            console.print(f"{'x'.join(map(str, shape))}: not settled after {_MOST_STEPS} steps: the machine is busy")
    facts = setting()
    console.print(f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}", highlight=False)
    console.print(f"{file_of(folder)}", markup=False, highlight=False, soft_wrap=True)
    known = load(file_of(folder))
    if known:
        console.print(table(known))
    console.print(f"{len(known)} measured" if known else "nothing is measured yet: train, or give --fill")
    return 0
