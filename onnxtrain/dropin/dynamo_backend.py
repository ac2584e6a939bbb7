"""The backends of torch.compile under the predecessor's names: each is `onnxtrain.dynamo.backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain import dynamo
from onnxtrain.options.notices import warn_once


class OrtBackend:
    """A backend of torch.compile: `torch.compile(model, backend=OrtBackend())`. It trains as well as it infers.

    Args:
        ep: an execution provider of onnxruntime. It chooses nothing here: a graph runs where its tensors are.
        preallocate_output: chooses nothing here: PyTorch's allocator gives the memory.
    """

    def __init__(self, ep: str = "", preallocate_output: bool = False) -> None:
        if ep:
            warn_once(f"OrtBackend(ep={ep!r}) has no effect: a graph runs where its tensors are.")
        if preallocate_output:
            warn_once("OrtBackend(preallocate_output=True) has no effect: PyTorch's allocator gives the memory.")

    def compile(self, graph_module: torch.fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph that torch.compile found; it is captured at its first call."""
        return dynamo.backend(graph_module, args)

    __call__ = compile


DEFAULT_BACKEND = OrtBackend()


def make_aot_ort(dynamic: bool = False) -> tuple[OrtBackend, OrtBackend]:
    """A backend for training, and the one inside it: the same here.

    Args:
        dynamic: sizes stay open whether it is set or not.
    """
    made = OrtBackend()
    return made, made
