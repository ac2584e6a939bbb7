"""`onnxtrain run script.py ...`: runs a script of ONNX Runtime Training, unchanged.

A process that the script starts by `spawn` begins with the script's own imports: a script that does so needs
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
    """Adds the command's arguments."""
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is named as a module")
    parser.add_argument("script", help="a path, or the name of a module after -m")
    own = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    own.required = False  # else argparse asks for them where there is no script


def run(options: argparse.Namespace) -> int:
    """Runs the script as the main program, with `onnxruntime.training` in place."""
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
        traceback.print_exc()  # as Python shows what ends a script
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises OptionError where there is nothing to run."""
    script = options.script
    if not options.is_module:
        if Path(script).is_file() or (Path(script) / "__main__.py").is_file():
            return
        raise OptionError(
            "There is no such script.",
            where="onnxtrain run",
            expected="the path of a Python script, or of a folder with a __main__.py",
            got=script,
            todo="check the path, or put -m before the name of a module",
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(script) is not None
    except (ImportError, ValueError):  # a package above it is missing
        found = script.startswith("onnxruntime.training.")  # which is there once the drop-in is
    if not found:
        raise OptionError("There is no such module.", "onnxtrain run -m", got=script, todo="check the name")
