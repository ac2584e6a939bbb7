"""Compile a program in the process of `regions.child`: trace it on fake tensors, and give the trace to Inductor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.inductor_program.stored import StoredProgram
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions.request import LIBRARY
from onnxtrain.graph.sizes import Size
from onnxtrain.native.build import append_digest
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Kernel
from onnxtrain.ops.interfaces.traced_calls import TRACED_CALLS
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import program_compiler

_FUNCTIONS = {"max": torch.sym_max, "min": torch.sym_min, "abs": abs}


def compile_program(model: ir.Model, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the artifact of a program to a folder."""
    device = torch.device(metadata["device"])
    part = _part(model, metadata)
    mode, symbols = program_compiler.symbolic_sizes(dict(zip(metadata["symbols"], metadata["typical"], strict=True)))
    fields = ("shapes", "strides", "dtypes", "on_host")
    with mode:
        tensors = [
            torch.empty_strided(
                [_evaluate(size, symbols) for size in shape],
                [_evaluate(stride, symbols) for stride in strides],
                dtype=getattr(torch, dtype),
                device="cpu" if on_host else device,
            )
            for shape, strides, dtype, on_host in zip(*(metadata[field] for field in fields), strict=True)
        ]
    program = Program(part, "compiled program", device, _kernel)
    for name, function in program.namespace.items():
        if callable(function) and _is_hashable(function) and function in TRACED_CALLS:
            program.namespace[name] = TRACED_CALLS[function]
    named = list(symbols.values())

    def run(*arguments: Any) -> list[torch.Tensor]:
        values = dict(zip(metadata["symbols"], arguments[: len(named)], strict=True))
        sizes_in = [_evaluate(size, values) for size in metadata["sizes"]]
        results, _ = program.run(list(arguments[len(named) :]), sizes_in)
        return list(results)

    traced = program_compiler.trace(mode, run, [*named, *tensors])
    configs = {"cpp.threads": metadata["threads"]}
    # Inductor's own cache knows operators by their names, whatever version of onnxtrain defined them.
    with torch.compiler.config.patch(cache_key_tag=metadata["versions"]):  # type: ignore[attr-defined]
        compiled = program_compiler.compile_trace(mode, traced, named, configs, folder / "artifact.bin")
    library = folder / f"{LIBRARY}.partial"
    StoredProgram(compiled.artifact, compiled.guards, traced.constants).write(library)
    append_digest(library)
    library.replace(folder / LIBRARY)


def _part(model: ir.Model, metadata: Mapping[str, Any]) -> Part:
    graph = model.graph
    inputs, names = tuple(graph.inputs), set(metadata["host"])
    tensors, sizes_in = inputs[: metadata["num_tensors"]], inputs[metadata["num_tensors"] :]
    host = frozenset(v for v in (*inputs, *(v for node in graph for v in node.outputs)) if v.name in names)
    return Part(tuple(graph), tensors, sizes_in, tuple(graph.outputs), (), host, 0)


def _kernel(node: ir.Node, device: str) -> Kernel:
    """Return PyTorch's own kernel of a node."""
    return definition_of(node).candidates(node, device)[0]


def _is_hashable(function: Any) -> bool:
    return type(function).__hash__ is not None


def _evaluate(size: Size, symbols: Mapping[str, Any]) -> Any:
    """Return a size for symbolic values of its symbols."""
    if isinstance(size, int):
        return size
    return eval(size, {"__builtins__": {}, **_FUNCTIONS}, dict(symbols))  # our own canonical form, see graph.sizes
