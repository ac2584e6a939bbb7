"""A compiled function as a program, for the sizes that it was emitted for and contiguous tensors.

Other calls run the ordinary program. The program is `entry.cpp` if that can be compiled, else generated Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.cpp_program.source import Function
from onnxtrain.execute.cpp_program.static_graph import StaticGraph
from onnxtrain.execute.program import Run
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native import Library
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.cpp import Shape, strides_of
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.tensors import empty_strided_cpu

Kind = tuple[Shape, torch.dtype]

ENTRY = Library(
    "cpp-program-entry",
    Path(__file__).with_name("entry.cpp").read_text(encoding="utf-8"),
    {"make": "pooooooo>o"},
    keeps_gil=True,
    torch_headers=True,
)


@dataclass(frozen=True)
class Call:
    """A compiled function, and the inputs and results of the program that it replaces.

    Attributes:
        function: takes an array of pointers.
        inputs: shape and dtype of each program input.
        dynamic: indices of the inputs that have dynamic sizes.
        read: indices of the inputs whose pointers the function takes.
        outputs: shape and dtype of each tensor that it writes; their pointers follow those of the inputs.
        results: for each result of the program, the index i of an output, or -1 - i for input i, or None.
        sizes_in, sizes_out: the sizes that the program takes and returns.
    """

    function: Any
    inputs: tuple[Kind, ...]
    dynamic: frozenset[int]
    read: tuple[int, ...]
    outputs: tuple[Kind, ...]
    results: tuple[int | None, ...]
    sizes_in: tuple[int, ...]
    sizes_out: tuple[int, ...]

    @classmethod
    def from_function(
        cls, part: Part, static: StaticGraph, shapes: Sequence[Shape], function: Function, compiled: Any
    ) -> Call:
        """Describe the call of a part.

        Args:
            part: the part of the plan that the program runs.
            static: the part at these sizes.
            shapes: those of its inputs.
            function: emitted from `static`.
            compiled: the compiled function.
        """
        results: list[int | None] = [None] * len(part.outputs)
        positions = (i for i, value in enumerate(part.outputs) if value is not None)  # of the graph's outputs
        for number, position in enumerate(positions):
            source = static.passed_through.get(number)
            results[position] = function.outputs.index(number) if source is None else -1 - source
        written = [static.graph.outputs[number] for number in function.outputs]
        return cls(
            compiled,
            tuple((shape, _dtype(value)) for value, shape in zip(part.inputs, shapes, strict=True)),
            frozenset(i for i, v in enumerate(part.inputs) if any(isinstance(size, str) for size in sizes.dims_of(v))),
            function.inputs,
            tuple((tuple(int(size) for size in sizes.dims_of(value)), _dtype(value)) for value in written),
            tuple(results),
            static.sizes_in,
            static.sizes_out,
        )


def _dtype(value: ir.Value) -> torch.dtype:
    return TORCH_DTYPES[dtype_of(value)]


def compiled_call(call: Call, ordinary: Run) -> Run:
    """Return the call as a program in C++. `ENTRY.functions` must be available."""
    address = ctypes.cast(call.function, ctypes.c_void_p)
    run: Run = ENTRY.functions.make(
        address, ordinary, call.inputs, call.read, call.outputs, call.results, call.sizes_in or None, call.sizes_out
    )
    return run


def python_call(call: Call, ordinary: Run) -> Run:
    """Return the call as a program in generated Python."""
    inputs = [f"a{i}" for i in range(len(call.inputs))]
    outputs = [f"o{i}" for i in range(len(call.outputs))]
    results = ["None" if i is None else inputs[-1 - i] if i < 0 else outputs[i] for i in call.results]
    conditions = [f"{inputs[i]}.shape == shape_{i}" for i in sorted(call.dynamic)]
    conditions += [f"{inputs[i]}.is_contiguous() and not {inputs[i]}.is_neg()" for i in call.read]
    conditions += [f"(*sizes,) == {call.sizes_in!r}"] if call.sizes_in else []
    pointers = [f"{name}.data_ptr()" for name in (*(inputs[i] for i in call.read), *outputs)]
    arguments = f"({''.join(f'{name}, ' for name in inputs)})"
    lines = [
        "def program(arguments, sizes):",
        "    if profiling(): return ordinary(arguments, sizes)",
        f"    {arguments} = arguments",
        f"    if not ({' and '.join(conditions) or True}): return ordinary({arguments}, sizes)",
        *(
            f"    {name} = empty({shape!r}, {strides_of(shape)!r}, {dtype!r})"
            for name, (shape, dtype) in zip(outputs, call.outputs, strict=True)
        ),
        f"    run(pointers({', '.join(pointers)}))",
        f"    return ({''.join(f'{r}, ' for r in results)}), {call.sizes_out!r}",
    ]
    namespace: dict[str, Any] = {
        "profiling": dispatch.profiler_enabled,
        "ordinary": ordinary,
        "empty": empty_strided_cpu,
        "torch": torch,
        "run": call.function,
        "pointers": ctypes.c_void_p * len(pointers),
        **{f"shape_{i}": torch.Size(call.inputs[i][0]) for i in call.dynamic},
    }
    exec("\n".join(lines), namespace)  # our own generated source
    run: Run = namespace["program"]
    return run
