"""The process that compiles regions: python -m onnxtrain.execute.regions.child CONNECTION.

A region is traced as the program of its nodes. PyTorch's AOTInductor compiles the trace to C++, and the C++ compiler
builds a library. CONNECTION is a file descriptor, from which the process reads the names of folders with one request
each. It writes the library to the folder, as `library.so`, and answers with the error, or "". It compiles the programs
of `inductor_program` too.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
import zipfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.execute.inductor_program.child import compile_program
from onnxtrain.execute.program import Program
from onnxtrain.execute.regions import request
from onnxtrain.execute.regions.call import RegionCall, load
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native.build import append_digest
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.cut import single_part
from onnxtrain.torch_compat import inductor


class _Region(torch.nn.Module):
    """The nodes as a module, for the tracer."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, _ = self._program.run(tensors, ())
        return results


def main(connection: Connection) -> None:
    """Compile requests until the other side closes the connection."""
    while True:
        try:
            folder = Path(connection.recv())
        except EOFError:
            return
        try:
            compile_in(folder)
        except Exception:  # noqa: BLE001  # whatever Inductor raises
            text = traceback.format_exc().partition("\nException raised from ")[0]  # PyTorch appends frames of C++
            connection.send("\n".join(text.strip().splitlines()[-5:]))
        else:
            connection.send("")


def compile_in(folder: Path) -> None:
    """Compile the request in a folder."""
    model, metadata = request.read_request(folder)
    if metadata["kind"] == "program":
        compile_program(model, metadata, folder)
        return
    part = single_part(model)
    shapes = [_typical_shape(value, shape) for value, shape in zip(model.graph.inputs, metadata["shapes"], strict=True)]
    region = _Region(Program(part, "region", torch.device("cpu")))
    with torch.no_grad():
        tensors, dims = _example(model, shapes)
        traced = torch.export.export(region, tensors, dynamic_shapes=(dims,), strict=False)
    package = folder / "package.pt2"
    configs = {"cpp.threads": metadata["threads"]}
    inductor.COMPILE_PACKAGE.get()(traced, package_path=str(package), inductor_configs=configs)
    with zipfile.ZipFile(package) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        library = folder / f"{request.LIBRARY}.partial"
        library.write_bytes(archive.read(name))
    # A kernel that crashes ends this process, not the training.
    RegionCall(part, load(library)).compare(shapes)
    append_digest(library)
    library.replace(folder / request.LIBRARY)


def _typical_shape(value: ir.Value, shape: list[int]) -> list[int]:
    """Return the shape of an input in a typical call, with each dynamic size at least `MIN_DYNAMIC_SIZE`."""
    pairs = zip(sizes.dims_of(value), shape, strict=True)
    return [max(n, request.MIN_DYNAMIC_SIZE) if isinstance(size, str) else n for size, n in pairs]


def _example(model: ir.Model, shapes: list[list[int]]) -> Any:
    """Return tensors of these shapes, and their dynamic dimensions for torch.export."""
    dynamic = functools.cache(lambda name: torch.export.Dim(name, min=request.MIN_DYNAMIC_SIZE))
    tensors, dims = [], []
    for value, shape in zip(model.graph.inputs, shapes, strict=True):
        tensors.append(torch.zeros(shape, dtype=TORCH_DTYPES[dtype_of(value)]))
        dims.append({i: dynamic(size) for i, size in enumerate(sizes.dims_of(value)) if isinstance(size, str)})
    return tuple(tensors), tuple(dims)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    main(Connection(int(sys.argv[1])))
