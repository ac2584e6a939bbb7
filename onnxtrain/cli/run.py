"""`onnxtrain run script.py ...`: runs a script of ONNX Runtime Training, unchanged.

A process that the script starts by `spawn` begins with the script's own imports: a script that does so needs
`import onnxtrain.dropin` as its first line.
"""

from __future__ import annotations

import argparse
import importlib
import runpy
import sys
import traceback
from pathlib import Path

from onnxtrain.errors import OnnxTrainError, OptionError


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("-m", action="store_true", dest="is_module", help="the script is named as a module")
    parser.add_argument("script", help="a path, or the name of a module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")


def run(options: argparse.Namespace) -> int:
    """Runs the script as the main program, with `onnxruntime.training` in place."""
    if not options.is_module and not Path(options.script).exists():
        raise OptionError(
            "there is no such script",
            where="onnxtrain run",
            expected="the path of a Python script",
            got=options.script,
            todo="check the path, or put -m before the name of a module",
        )
    importlib.import_module("onnxtrain.dropin")
    sys.argv = [options.script, *options.arguments]
    try:
        if options.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(options.script).parent.absolute()))
            runpy.run_path(options.script, run_name="__main__")
    except OnnxTrainError:
        traceback.print_exc()  # as Python shows what ends a script
        return 1
    return 0
