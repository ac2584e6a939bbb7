"""The command line: `onnxtrain <command>`, or `python -m onnxtrain <command>`.

A command is a module of this package with

    def arguments(parser: argparse.ArgumentParser) -> None      adds its arguments
    def run(options: argparse.Namespace) -> int                 runs it; gives the exit code

and a line in COMMANDS. It is imported only when it is asked for: `--help` needs no torch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console

from onnxtrain.errors import OnnxTrainError, OptionError

# The command and what it does. Its module has the same name, with _ for -.
COMMANDS: Mapping[str, str] = {
    "artifacts": "make the files that train an ONNX model on a device",
    "explain": "say what each pass did with a model and what it refused, and the work before and after",
    "memory": "show where the memory of a training step goes, tensor by tensor",
    "ops": "list all operators: kernels, body, gradient, axes, effects",
    "options": "list all options: value, what decided it, meaning",
    "report": "write a page about a model: graph before and after, what was done, time, eager's numbers",
    "run": "run a script of ONNX Runtime Training, unchanged",
    "train": "train a folder of artifacts on data, for a first try without code",
    "tune": "show, measure or forget how long kernels take on this machine",
    "verify": "say whether a model's graph gives eager PyTorch's numbers; if not, which operator differs first",
}

FAILED = 1
USAGE = 2  # as argparse: the command line itself, or what it names, is wrong
_OF_ORT = ("flatbuffers", "onnxruntime")  # what the extra `ort` installs


class Command(Protocol):
    """What a command's module defines."""

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int: ...


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(["commands:", *lines, "", "`onnxtrain <command> --help` says more about one."])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments after the program's name; those of the process where None.

    Returns:
        The exit code: 0; USAGE where an argument, option or variable is wrong; FAILED after another error of this
        package, or of the user's own code, whose traceback is shown without this package's frames. Where argparse
        refuses the arguments the process ends with USAGE.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="onnxtrain",
        description="Trains PyTorch models as ONNX graphs.",
        epilog=_overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="onnxtrain <command> [options]",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="see below")
    if not given:
        parser.print_help(sys.stderr)
        return USAGE
    name = parser.parse_args(given[:1]).command
    try:
        command: Command = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name not in _OF_ORT:
            raise
        text = f"onnxtrain {name} needs {error.name}.\n  to do:    pip install 'onnxtrain[ort]'"
        Console(stderr=True).print(text, style="red", markup=False, soft_wrap=True)
        return FAILED
    own = argparse.ArgumentParser(
        prog=f"onnxtrain {name}", description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    )
    command.arguments(own)
    try:
        return command.run(own.parse_args(given[1:]))
    except OnnxTrainError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
        return USAGE if isinstance(error, OptionError) else FAILED
    except Exception as error:
        from onnxtrain.capture.source_line import hide_own_frames  # noqa: PLC0415  needs torch, which --help does not

        if not hide_own_frames(error):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
