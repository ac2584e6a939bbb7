"""`onnxtrain verify MODEL`: compare a model's graph with eager PyTorch, and name the first operator that differs."""

from __future__ import annotations

import argparse

from onnxtrain.cli import FAILED
from onnxtrain.cli.model import model_arguments, model_of
from onnxtrain.frontend.verification import verify


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    model_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Print the verdict; return FAILED if a tensor is out of tolerance."""
    loaded = model_of(options)
    return 0 if verify(loaded.module, loaded.batch).is_right else FAILED
