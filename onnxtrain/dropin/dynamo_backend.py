"""The backends of torch.compile under the predecessor's names: each is `onnxtrain.dynamo.backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.frontend import dynamo
from onnxtrain.log import warn_once


class OrtBackend:
    """A backend of torch.compile: `torch.compile(model, backend=OrtBackend())`. It trains as well as it infers.

    Args:
        ep: an execution provider of onnxruntime. It chooses nothing here: a graph runs where its tensors are.
        preallocate_output: chooses nothing here: PyTorch's allocator gives the memory.

    Attributes:
        assert_allclose_to_baseline: whether each call of a graph is compared with PyTorch's results.
    """

    def __init__(self, ep: str = "", preallocate_output: bool = False) -> None:
        self.assert_allclose_to_baseline = False
        if ep:
            warn_once(f"OrtBackend(ep={ep!r}) has no effect: a graph runs where its tensors are.")
        if preallocate_output:
            warn_once("OrtBackend(preallocate_output=True) has no effect: PyTorch's allocator gives the memory.")

    def compile(self, graph_module: torch.fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        """What runs a graph that torch.compile found; it is captured at its first call."""
        compiled = dynamo.backend(graph_module, args)

        def run(*arguments: Any) -> Any:
            if not self.assert_allclose_to_baseline:
                return compiled(*arguments)
            baseline = _in_pytorch(graph_module, arguments)
            found = compiled(*arguments)
            _compare(found, baseline)
            return found

        return run

    __call__ = compile


def _in_pytorch(graph: torch.fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """What the graph gives in PyTorch, of copies: it may change its arguments. Random numbers are drawn again later."""
    devices = {a.device for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        return graph(*copies)


def _compare(found: Any, baseline: Any) -> None:
    """Raises RuntimeError where the results differ by more than the predecessor's tolerance."""
    try:
        torch.testing.assert_close(found, baseline, rtol=1e-3, atol=1e-4, equal_nan=True)
    except AssertionError as error:
        raise RuntimeError(
            f"the graph's results differ from PyTorch's: {error}. Dropout is compared under ONNXTRAIN_RNG=torch only."
        ) from error


DEFAULT_BACKEND = OrtBackend()


def make_aot_ort(dynamic: bool = False) -> tuple[OrtBackend, OrtBackend]:
    """A backend for training, and the one inside it: the same here.

    Args:
        dynamic: sizes stay open whether it is set or not.
    """
    made = OrtBackend()
    return made, made
