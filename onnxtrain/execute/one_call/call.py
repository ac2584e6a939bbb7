"""A compiled function as a program: on the sizes that it was written for, and on contiguous memory.

Other calls go the ordinary way. `entry.cpp` is the program where it can be compiled, generated Python where not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.one_call.arrays import Shape, strides_of
from onnxtrain.execute.one_call.source import Function
from onnxtrain.execute.one_call.static_graph import StaticGraph
from onnxtrain.execute.program import Run
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native import Library
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.tensors import empty_strided_cpu

Kind = tuple[Shape, torch.dtype]

ENTRY = Library(
    "one-call-entry",
    Path(__file__).with_name("entry.cpp").read_text(encoding="utf-8"),
    {"make": "pooooooo>o"},
    short=True,
    torch_headers=True,
)


@dataclass(frozen=True)
class Call:
    """A compiled function and the program that it stands for.

    Attributes:
        function: takes an array of pointers.
        inputs: what the program takes.
        free: positions of those that may come with other sizes.
        read: positions of the inputs whose pointers the function takes.
        outputs: what it writes: their pointers come behind those.
        results: what the program gives: an output, by its number; an input, by -1 less its number; or None.
        sizes_in, sizes_out: what the program takes and gives besides.
    """

    function: Any
    inputs: tuple[Kind, ...]
    free: frozenset[int]
    read: tuple[int, ...]
    outputs: tuple[Kind, ...]
    results: tuple[int | None, ...]
    sizes_in: tuple[int, ...]
    sizes_out: tuple[int, ...]

    @classmethod
    def of(cls, part: Part, static: StaticGraph, shapes: Sequence[Shape], function: Function, compiled: Any) -> Call:
        """The call of a part.

        Args:
            part: what the program is of.
            static: the same for known sizes.
            shapes: of its inputs.
            function: that of `static`.
            compiled: the same, ready to be called.
        """
        results: list[int | None] = [None] * len(part.outputs)
        wanted = (i for i, value in enumerate(part.outputs) if value is not None)  # the graph's outputs, in order
        for number, place in enumerate(wanted):
            given = static.given.get(number)
            results[place] = function.outputs.index(number) if given is None else -1 - given
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
    """The program, compiled. Only once `ENTRY.functions` are there."""
    address = ctypes.cast(call.function, ctypes.c_void_p)
    run: Run = ENTRY.functions.make(
        address, ordinary, call.inputs, call.read, call.outputs, call.results, call.sizes_in or None, call.sizes_out
    )
    return run


def python_call(call: Call, ordinary: Run) -> Run:
    """The program as Python source."""
    names = [f"a{i}" for i in range(len(call.inputs))]
    made = [f"o{i}" for i in range(len(call.outputs))]
    results = ["None" if i is None else names[-1 - i] if i < 0 else made[i] for i in call.results]
    conditions = [f"{names[i]}.shape == shape_{i}" for i in sorted(call.free)]
    conditions += [f"{names[i]}.is_contiguous() and not {names[i]}.is_neg()" for i in call.read]
    conditions += [f"(*sizes,) == {call.sizes_in!r}"] if call.sizes_in else []
    pointers = [f"{name}.data_ptr()" for name in (*(names[i] for i in call.read), *made)]
    arguments = f"({''.join(f'{name}, ' for name in names)})"
    lines = [
        "def program(arguments, sizes):",
        "    if profiling(): return ordinary(arguments, sizes)",
        f"    {arguments} = arguments",
        f"    if not ({' and '.join(conditions) or True}): return ordinary({arguments}, sizes)",
        *(
            f"    {name} = empty({shape!r}, {strides_of(shape)!r}, {dtype!r})"
            for name, (shape, dtype) in zip(made, call.outputs, strict=True)
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
        **{f"shape_{i}": torch.Size(call.inputs[i][0]) for i in call.free},
    }
    exec("\n".join(lines), namespace)  # our own generated source
    run: Run = namespace["program"]
    return run
