"""Backends of torch.compile with the names of ONNX Runtime Training; each calls `onnxtrain.dynamo.backend`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.frontend import dynamo
from onnxtrain.log import warn_once


class OrtBackend:
    """A backend of torch.compile for training and inference: `torch.compile(model, backend=OrtBackend())`.

    Args:
        ep: an execution provider of onnxruntime. No effect: a graph runs on the device of its tensors.
        preallocate_output: no effect: outputs are allocated by PyTorch's allocator.

    Attributes:
        assert_allclose_to_baseline: whether to compare each call of a graph with PyTorch's results.
    """

    def __init__(self, ep: str = "", preallocate_output: bool = False) -> None:
        self.assert_allclose_to_baseline = False
        if ep:
            warn_once(f"OrtBackend(ep={ep!r}) has no effect: a graph runs on the device of its tensors.")
        if preallocate_output:
            warn_once("OrtBackend(preallocate_output=True) has no effect: PyTorch allocates the outputs.")

    def compile(self, graph_module: torch.fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that runs a graph of torch.compile. The graph is captured on its first call."""
        compiled = dynamo.backend(graph_module, args)

        def run(*arguments: Any) -> Any:
            if not self.assert_allclose_to_baseline:
                return compiled(*arguments)
            baseline = _run_in_pytorch(graph_module, arguments)
            outputs = compiled(*arguments)
            _compare(outputs, baseline)
            return outputs

        return run

    __call__ = compile


def _run_in_pytorch(graph: torch.fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Run the graph in PyTorch on copies, as it may mutate its arguments. The RNG state is restored afterwards."""
    devices = {a.device for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "cuda"}
    copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        return graph(*copies)


def _compare(outputs: Any, baseline: Any) -> None:
    """Raise RuntimeError if the results differ by more than the tolerance of ONNX Runtime Training."""
    try:
        torch.testing.assert_close(outputs, baseline, rtol=1e-3, atol=1e-4, equal_nan=True)
    except AssertionError as error:
        raise RuntimeError(
            f"The outputs of the graph differ from those of PyTorch: {error}. If the graph has dropout, set "
            "ONNXTRAIN_RNG=torch, so that both sample the same masks."
        ) from error


DEFAULT_BACKEND = OrtBackend()


def make_aot_ort(dynamic: bool = False) -> tuple[OrtBackend, OrtBackend]:
    """Return a backend with AOTAutograd and the one that it wraps: here the same object.

    Args:
        dynamic: a graph serves all sizes in either case.
    """
    shared = OrtBackend()
    return shared, shared
