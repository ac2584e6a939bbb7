"""The command line: `onnxtrain <command>`, or `python -m onnxtrain <command>`.

A command is a module of this package with

    def arguments(parser: argparse.ArgumentParser) -> None      adds its arguments
    def run(options: argparse.Namespace) -> int                 runs it; returns the exit code

and a line in COMMANDS. It is imported only when it runs: `--help` does not need torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console

from onnxtrain.errors import OnnxTrainError, OptionError

# Each command and its description. Its module has the same name, with _ for -.
COMMANDS: Mapping[str, str] = {
    "artifacts": "generate the files to train an ONNX model on a device",
    "explain": "show what each pass applied and refused for a model, and its FLOPs before and after",
    "memory": "show the memory of a training step, tensor by tensor",
    "ops": "list all operators: kernels, body, gradient, axes, effects",
    "options": "list all options: value, source, meaning",
    "plan-scale": "plan a training step under FSDP2 on many ranks: bytes, collectives, overlap",
    "report": "write an HTML report of a model: graph before and after, passes, time, comparison with eager",
    "run": "run a script of ONNX Runtime Training, unchanged",
    "train": "train a folder of artifacts on data, to try them without code",
    "tune": "show, measure or clear the kernel times of this machine",
    "verify": "compare a model's graph with eager PyTorch, and name the first operator that differs",
}

FAILED = 1
USAGE = 2  # as argparse exits: invalid arguments, or arguments that name something missing
_ORT_PACKAGES = ("flatbuffers", "onnxruntime")  # installed by the extra `ort`


class Command(Protocol):
    """The functions that a command's module defines."""

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {description}" for name, description in COMMANDS.items()]
    return "\n".join(["commands:", *lines, "", "See `onnxtrain <command> --help` for the options of a command."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None: those of the process.

    Returns:
        The exit code: 0 on success; USAGE if an argument, option or variable is invalid; FAILED after any other error
        of this package or of the user's code, whose traceback is shown without this package's frames. If argparse
        rejects the arguments, the process exits with USAGE.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="onnxtrain",
        description="Train PyTorch models as ONNX graphs.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="onnxtrain <command> [options]",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="see below")
    if not words:
        parser.print_help(sys.stderr)
        return USAGE
    name = parser.parse_args(words[:1]).command
    try:
        command: Command = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name not in _ORT_PACKAGES:
            raise
        text = f"onnxtrain {name} requires {error.name}.\n  to do:    pip install 'onnxtrain[ort]'"
        Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True)
        return FAILED
    own = argparse.ArgumentParser(
        prog=f"onnxtrain {name}", description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    )
    command.arguments(own)
    try:
        return command.run(own.parse_args(words[1:]))
    except OnnxTrainError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        return USAGE if isinstance(error, OptionError) else FAILED
    except Exception as error:
        from onnxtrain.capture.source_location import hide_own_frames  # noqa: PLC0415  needs torch, which --help does not

        if not hide_own_frames(error):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
