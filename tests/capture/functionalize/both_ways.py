"""Captures made by our own rewriting of the capture, and by PyTorch's functionalization: they have to be one graph."""

from typing import Any

import pytest
import torch

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.capture import capture
from onnxtrain.capture.capture import Captured
from onnxtrain.capture.functionalize.functional_calls import is_convertible


class BothWays:
    """Captures modules in the one way and the other.

    Attributes:
        graphs: those that were captured.
        is_plain: whether none has been made functional by PyTorch so far, but those for which that was asked.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[list[Any]] = []
        self.is_plain = True
        self._asked = False
        self._own = (capture.make_convertible, capture._functionalize, capture._assemble)
        monkeypatch.setattr(capture, "make_convertible", self._make_convertible)
        monkeypatch.setattr(capture, "_functionalize", self._functionalize)
        monkeypatch.setattr(capture, "_assemble", self._assemble)

    def calls(self, module: torch.nn.Module, x: torch.Tensor, *, functionalized: bool) -> list[Any]:
        """Two calls of a module, made functional by PyTorch where that is asked for."""
        self._asked = functionalized
        ours = ORTModule(module, fallback_policy=FallbackPolicy.FALLBACK_DISABLE, cache_dir=None)
        return [ours(x), ours(x)]

    def _make_convertible(self, program: Any) -> bool:
        return is_convertible(program) if self._asked else self._own[0](program)

    def _functionalize(self, program: Any) -> Any:
        self.is_plain = self.is_plain and self._asked
        return self._own[1](program)

    def _assemble(self, *args: Any) -> Captured:
        captured = self._own[2](*args)
        self.graphs.append(nodes(captured))
        return captured


def nodes(captured: Captured) -> list[Any]:
    """All that a graph does, with numbers for names."""
    graph = captured.model.graph
    numbers: dict[Any, int] = {None: -1}

    def number(value: Any) -> int:
        return numbers.setdefault(value, len(numbers))

    found: list[Any] = [(number(v), v.dtype, str(v.shape)) for v in graph.inputs]
    for node in graph:
        attributes = sorted((name, str(value)) for name, value in node.attributes.items())
        outputs = [(number(v), v.dtype, str(v.shape)) for v in node.outputs]
        found.append((node.op_type, attributes, [number(v) for v in node.inputs], outputs))
    outputs = [number(v) for v in graph.outputs]
    return [*found, outputs, captured.sources, captured.mutations, captured.result_count, captured.sizes]
