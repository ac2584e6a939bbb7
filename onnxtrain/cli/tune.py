"""`onnxtrain tune`: show the kernel times measured on this machine, or measure them in advance."""

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
from onnxtrain.execute.kernel_choice.tuned_program import answers_in
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.observe.logs import only_errors
from onnxtrain.options import Options

Shape = tuple[int, int, int]  # rows, inputs and outputs of a linear layer

_HIDDEN = (384, 768, 1024)
_ROWS = (512, 2048)
COMMON: tuple[Shape, ...] = tuple(
    (rows, *sides) for rows in _ROWS for h in _HIDDEN for sides in ((h, h), (h, 4 * h), (4 * h, h))
)
_MAX_STEPS = 60  # on a busy machine most measurements are discarded
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def table(answers: Answers) -> Table:
    """Return the measurements for a terminal, one row each."""
    result = Table(header_style="bold")
    for column in ("operator, dtype, sizes", "measured at", "times", "choice"):
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
    """Run steps of a linear layer until its kernels are chosen. Returns whether they are.

    Uses a temporary folder first: measurements at other sizes would rule out candidates.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = file_of(Path(scratch))
        is_chosen = _run(shape, dtype, file.parent, answers_in(file))
        save(file_of(folder), answers_in(file))
    return is_chosen


def _run(shape: Shape, dtype: torch.dtype, folder: Path, answers: Answers) -> bool:
    rows, inputs, outputs = shape
    module = ORTModule(torch.nn.Linear(inputs, outputs, dtype=dtype), tuning=True, cache_dir=folder)
    x = torch.randn(rows, inputs).to(dtype).requires_grad_()
    cotangent = torch.randn(rows, outputs).to(dtype)
    for number in range(_MAX_STEPS):
        module(x).backward(cotangent)
        if number and all(answer.choice for answer in answers.values()):  # the first step measures nothing
            return True
    return False


def _read_shape(text: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise OptionError(
            "The shape of a linear layer is not valid.",
            "onnxtrain tune --shapes",
            "ROWSxINPUTSxOUTPUTS, such as 2048x384x1536",
            text,
            "Give three positive integers.",
        )
    rows, inputs, outputs = map(int, text.split("x"))
    return rows, inputs, outputs


def clear(folder: Path | None) -> Path | None:
    """Remove this machine's file. Returns its path, or None if there was none."""
    file = file_of(folder)
    if not file.exists():
        return None
    file.unlink()
    return file


# The command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--fill", action="store_true", help="measure linear layers of common sizes")
    action.add_argument(
        "--shapes", nargs="+", metavar="ROWSxINPUTSxOUTPUTS", help="measure linear layers of these shapes"
    )
    action.add_argument("--clear", action="store_true", help="remove the measurements of this machine")
    parser.add_argument("--dtype", choices=_DTYPES, default="float32", help="the dtype to measure (default: float32)")
    parser.add_argument("--folder", type=Path, help="the folder of the measurements (default: as in training)")


def run(options: argparse.Namespace) -> int:
    """Measure if asked to, and print the table."""
    console = Console()
    folder = options.folder or Options.resolve().cache_dir
    if options.clear:
        removed = clear(folder)
        console.print(f"removed {removed}" if removed else f"nothing to remove: no {file_of(folder)}", markup=False)
        return 0
    shapes = COMMON if options.fill else tuple(map(_read_shape, options.shapes or ()))
    for shape in track(shapes, "measuring", console=console, disable=not shapes):
        if not fill(shape, _DTYPES[options.dtype], folder):
            console.print(f"{'x'.join(map(str, shape))}: undecided after {_MAX_STEPS} steps: the machine is busy")
    facts = setting()
    console.print(f"{facts['processor']}, {facts['threads']} threads, torch {facts['torch']}", highlight=False)
    console.print(f"{file_of(folder)}", markup=False, highlight=False, soft_wrap=True)
    answers = load(file_of(folder))
    if answers:
        console.print(table(answers))
    console.print(f"{len(answers)} measured" if answers else "nothing measured yet: train a model, or pass --fill")
    return 0
