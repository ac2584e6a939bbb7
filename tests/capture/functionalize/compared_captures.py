"""Compare captures made without retracing to those made by PyTorch's functionalization."""

from typing import Any

import pytest
import torch

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.capture import capture
from onnxtrain.capture.capture import Captured
from onnxtrain.capture.functionalize.functional_calls import is_convertible


class ComparedCaptures:
    """Capture modules with and without PyTorch's functionalization, and describe their graphs.

    Attributes:
        graphs: the description of each captured graph.
        is_retraced: whether PyTorch functionalized a capture for which the test did not request it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[list[Any]] = []
        self.is_retraced = False
        self._is_requested = False
        self._originals = (capture.make_convertible, capture.functionalize, capture._assemble)
        monkeypatch.setattr(capture, "make_convertible", self._make_convertible)
        monkeypatch.setattr(capture, "functionalize", self._functionalize)
        monkeypatch.setattr(capture, "_assemble", self._assemble)

    def call_twice(self, module: torch.nn.Module, x: torch.Tensor, *, functionalize: bool) -> list[Any]:
        """Return the results of two calls of a module, with its capture functionalized by PyTorch if requested."""
        self._is_requested = functionalize
        wrapped = ORTModule(module, fallback_policy=FallbackPolicy.FALLBACK_DISABLE, cache_dir=None)
        return [wrapped(x), wrapped(x)]

    def _make_convertible(self, program: Any) -> bool:
        return is_convertible(program) if self._is_requested else self._originals[0](program)

    def _functionalize(self, program: Any) -> Any:
        self.is_retraced = self.is_retraced or not self._is_requested
        return self._originals[1](program)

    def _assemble(self, *args: Any) -> Captured:
        captured = self._originals[2](*args)
        self.graphs.append(describe(captured))
        return captured


def describe(captured: Captured) -> list[Any]:
    """Describe a captured graph, with values numbered instead of named."""
    graph = captured.model.graph
    ids: dict[Any, int] = {None: -1}

    def id_of(value: Any) -> int:
        return ids.setdefault(value, len(ids))

    rows: list[Any] = [(id_of(v), v.dtype, str(v.shape)) for v in graph.inputs]
    for node in graph:
        attributes = sorted((name, str(value)) for name, value in node.attributes.items())
        outputs = [(id_of(v), v.dtype, str(v.shape)) for v in node.outputs]
        rows.append((node.op_type, attributes, [id_of(v) for v in node.inputs], outputs))
    outputs = [id_of(v) for v in graph.outputs]
    return [*rows, outputs, captured.sources, captured.mutations, captured.result_count, captured.sizes]
