"""`onnxtrain run script.py ...`: run a script of ONNX Runtime Training, unchanged.

A process that the script starts with `spawn` begins with the script's own imports: such a script needs
`import onnxtrain.dropin` as its first line.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
import traceback
from pathlib import Path

from onnxtrain.errors import OnnxTrainError, OptionError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("-m", action="store_true", dest="is_module", help="run a module by its name, as python -m")
    parser.add_argument("script", help="the path of a script; with -m, the name of a module")
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    own.required = False  # else argparse lists them as missing too, if there is no script


def run(options: argparse.Namespace) -> int:
    """Run the script as the main program, with `onnxruntime.training` importable."""
    _check(options)
    importlib.import_module("onnxtrain.dropin")
    sys.argv = [options.script, *options.arguments]
    try:
        if options.is_module:
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).parent.absolute()))
            runpy.run_path(options.script, run_name="__main__")
    except OnnxTrainError:
        traceback.print_exc()  # as Python does for an uncaught exception
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raise OptionError if there is no such script or module."""
    script = options.script
    if not options.is_module:
        if Path(script).is_file() or (Path(script) / "__main__.py").is_file():
            return
        raise OptionError(
            "Script not found.",
            where="onnxtrain run",
            expected="the path of a Python script, or of a folder with a __main__.py",
            got=script,
            todo="check the path, or use -m to run a module by its name",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        exists = importlib.util.find_spec(script) is not None
    except (ImportError, ValueError):  # a parent package is missing
        exists = script.startswith("onnxruntime.training.")  # provided by onnxtrain.dropin
    if not exists:
        raise OptionError(
            "Module not found.", "onnxtrain run -m", "the name of an importable module", script, "check the name"
        )
