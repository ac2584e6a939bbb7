"""Emit a static graph as C++: one function that reads the inputs and writes the outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native import read_sources
from onnxtrain.ops import view
from onnxtrain.ops.interfaces.cpp import CPP, Array, Shape, UnsupportedError, loops, strides_of

NAME = "run"
MAX_ELEMENTS = 1 << 17  # elements of all intermediates: they fit into the L2 cache of a core
_MAX_OPERATIONS = 1 << 23  # operations: above it, PyTorch's own kernels on all cores are faster


@dataclass(frozen=True)
class Function:
    """The function of a graph.

    Attributes:
        text: its C++, to be compiled after the headers of `source`. It takes an array of pointers.
        inputs: indices of the graph's inputs whose pointers come first.
        outputs: indices of the graph's outputs that it writes; their pointers follow.
    """

    text: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def source(self) -> str:
        matmul = Path(__file__).with_name("matmul.h").read_text(encoding="utf-8")
        return f"#include <cmath>\n\n{read_sources('vectors.h', 'gemm_tile.h')}\n{matmul}\n{self.text}"


def emit_function(graph: ir.Graph, passed_through: Mapping[int, int]) -> Function:
    """Emit a graph of standard ops with static sizes.

    Args:
        graph: the computation.
        passed_through: the outputs that are inputs; they are not written.

    Raises:
        UnsupportedError: the graph is too large, or an op or an element type has no emitter.
    """
    function = _Function(graph)
    for node in graph:
        function.emit(node)
    return function.close(passed_through)


class _Function:
    """A function while it is emitted."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._lines: list[str] = []
        self._arrays: dict[ir.Value, Array] = {}
        self._scratch = 0
        self._work = 0
        self._outputs = {value: f"out{i}" for i, value in enumerate(graph.outputs)}
        for i, value in enumerate(graph.inputs):
            shape = _static_shape(value)
            self._arrays[value] = Array(f"in{i}", dtype_of(value), shape, strides_of(shape))

    def lines(self, lines: Sequence[str]) -> None:
        self._lines += lines

    def new(self, dtype: ir.DataType, shape: Shape, value: ir.Value | None = None) -> Array:
        """Return the memory for a value: the caller's for an output, else the function's own."""
        output = self._outputs.get(value) if value is not None else None
        array = Array(output or f"t{self._scratch}", dtype, shape, strides_of(shape))
        count = math.prod(shape)
        if not output:
            self._scratch += count
            # Static: the caller holds the GIL, so two calls never overlap.
            self._lines.append(f"alignas(64) static {array.c_type} {array.name}[{max(count, 1)}];")
        self.work(count)
        return array

    def work(self, count: int) -> None:
        """Count arithmetic operations and written elements."""
        self._work += count

    def emit(self, node: ir.Node) -> None:
        emitter = CPP.entry(node)
        if emitter is None:
            raise UnsupportedError(f"{node.op_type} has no emitter")
        inputs = [self._array(value) for value in node.inputs if value is not None]
        if any(0 in array.shape for array in inputs):
            raise UnsupportedError("an empty tensor")
        results = emitter(self, view(node), inputs)
        self._arrays.update(zip(node.outputs, results, strict=True))
        if self._scratch > MAX_ELEMENTS or self._work > _MAX_OPERATIONS:
            raise UnsupportedError("too much work for one core")

    def _array(self, value: ir.Value) -> Array:
        if value not in self._arrays:
            self._arrays[value] = self._constant(value)
        return self._arrays[value]

    def _constant(self, value: ir.Value) -> Array:
        assert value.const_value is not None, f"{value.name} is read before it is written"
        data = value.const_value.numpy()
        if data.size > 4096:
            raise UnsupportedError("a large constant")
        array = Array(f"c{len(self._arrays)}", dtype_of(value), data.shape, strides_of(data.shape))
        elements = ", ".join(_literal(x) for x in data.reshape(-1)) or "0"
        self._lines.append(f"static const {array.c_type} {array.name}[] = {{{elements}}};")
        return array

    def close(self, passed_through: Mapping[int, int]) -> Function:
        """Copy outputs that are not in the caller's memory yet, and finish the source."""
        written = [i for i in range(len(self._graph.outputs)) if i not in passed_through]
        for i in written:
            array = self._array(self._graph.outputs[i])
            if array.name != f"out{i}" or not array.is_contiguous:
                target = Array(f"out{i}", array.dtype, array.shape, strides_of(array.shape))
                self._lines += loops([target, array], lambda e: f"{e[0]} = {e[1]};")
        text = "\n".join(f"  {line}" for line in self._lines)
        read = [i for i in range(len(self._graph.inputs)) if f"in{i}[" in text]
        types = [f"const {self._arrays[self._graph.inputs[i]].c_type}*" for i in read]
        types += [f"{self._array(self._graph.outputs[i]).c_type}*" for i in written]
        names = [*(f"in{i}" for i in read), *(f"__restrict out{i}" for i in written)]
        parameters = ", ".join(map(" ".join, zip(types, names, strict=True)))
        pointers = ", ".join(f"({kind})p[{i}]" for i, kind in enumerate(types))
        body = f"static void {NAME}({parameters}) {{\n{text}\n}}\n"
        entry = f'extern "C" void {NAME}(void* const* p) {{ {NAME}({pointers}); }}\n'
        return Function(body + entry, tuple(read), tuple(written))


def _static_shape(value: ir.Value) -> Shape:
    return tuple(int(size) for size in sizes.dims_of(value))


def _literal(x: Any) -> str:
    if isinstance(x, np.floating):
        if np.isnan(x):
            return "NAN"
        return ("-" if x < 0 else "") + "INFINITY" if np.isinf(x) else float(x).hex() + ("f" if x.itemsize == 4 else "")
    return str(int(x))
