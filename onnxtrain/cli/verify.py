"""`onnxtrain verify MODEL`: whether a model's graph gives eager PyTorch's numbers; if not, which operator is wrong."""

from __future__ import annotations

import argparse

from onnxtrain.cli import FAILED
from onnxtrain.cli.model import model_arguments, model_of
from onnxtrain.verification import verify


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the verdict; FAILED where it is not right."""
    loaded = model_of(options)
    return 0 if verify(loaded.module, loaded.batch).is_right else FAILED
