"""Counts the work of the graphs of one compilation, at the sizes of the call that it is for."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from onnxtrain.execute.program import Program
from onnxtrain.graph import sizes
from onnxtrain.graph.traversal import extract, with_graph
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.cost import count_work, unbound_symbols
from onnxtrain.plan.cut import single_part
from onnxtrain.report import Work

Tensor = torch.Tensor


class WorkCounter:
    """Counts graphs that one capture becomes.

    Args:
        inputs: the tensors of the forward graph's inputs.
        device: where graphs run.
    """

    def __init__(self, inputs: Sequence[Tensor], device: torch.device) -> None:
        self._inputs, self._device = inputs, device
        self._known: dict[str, int] = {}

    def __call__(self, model: ir.Model) -> Work:
        """What a run of the graph takes. Sizes that depend on data are found by running what they depend on."""
        graph = model.graph
        for value, tensor in zip(graph.inputs, self._inputs, strict=False):  # a joint graph has cotangents too
            for size, length in zip(sizes.dims_of(value), tensor.shape, strict=True):
                if isinstance(size, str) and size.isidentifier():
                    self._known.setdefault(size, length)
        while found := unbound_symbols(graph, self._known):
            self._learn(model, found)
        return count_work(graph, self._known)

    def _learn(self, model: ir.Model, found: dict[str, tuple[ir.Value, int]]) -> None:
        """Adds the size of the first of these symbols, whose value may be needed for others."""
        name, (value, axis) = next(iter(found.items()))
        asked = with_graph(model, extract(model.graph, [value]))
        tensors = [*self._inputs, *map(self._zeros, asked.graph.inputs[len(self._inputs) :])]
        with torch.no_grad():
            (result,) = Program(single_part(asked), f"{asked.graph.name} {name}", self._device).run(tensors, ())[0]
        self._known[name] = result.size(axis)

    def _zeros(self, cotangent: ir.Value) -> Tensor:
        shape = [sizes.evaluate(size, self._known) for size in sizes.dims_of(cotangent)]
        return torch.zeros(shape, dtype=TORCH_DTYPES[dtype_of(cotangent)], device=self._device)
