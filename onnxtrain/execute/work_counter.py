"""Count the work of the graphs of one compilation, at the sizes of its first call."""

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
    """Counts the work of the graphs that the pipeline makes of one capture.

    Args:
        inputs: the tensors of the forward graph's inputs.
        device: where graphs run.
    """

    def __init__(self, inputs: Sequence[Tensor], device: torch.device) -> None:
        self._inputs, self._device = inputs, device
        self._symbol_values: dict[str, int] = {}

    def __call__(self, model: ir.Model) -> Work:
        """Return the work of one run of a graph.

        Data-dependent dimensions are found by running the nodes they depend on.
        """
        graph = model.graph
        for value, tensor in zip(graph.inputs, self._inputs, strict=False):  # a joint graph has cotangents too
            for size, length in zip(sizes.dims_of(value), tensor.shape, strict=True):
                if isinstance(size, str) and size.isidentifier():
                    self._symbol_values.setdefault(size, length)
        while unbound := unbound_symbols(graph, self._symbol_values):
            self._bind_first(model, unbound)
        return count_work(graph, self._symbol_values)

    def _bind_first(self, model: ir.Model, unbound: dict[str, tuple[ir.Value, int]]) -> None:
        """Bind the first of these symbols; others may depend on it."""
        name, (value, axis) = next(iter(unbound.items()))
        subgraph = with_graph(model, extract(model.graph, [value]))
        tensors = [*self._inputs, *map(self._zeros, subgraph.graph.inputs[len(self._inputs) :])]
        with torch.no_grad():
            program = Program(single_part(subgraph), f"{subgraph.graph.name} {name}", self._device)
            (result,) = program.run(tensors, ())[0]
        self._symbol_values[name] = result.size(axis)

    def _zeros(self, cotangent: ir.Value) -> Tensor:
        shape = [sizes.evaluate(size, self._symbol_values) for size in sizes.dims_of(cotangent)]
        return torch.zeros(shape, dtype=TORCH_DTYPES[dtype_of(cotangent)], device=self._device)
