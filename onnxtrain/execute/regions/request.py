"""A region as bytes that another process can compile, and that name its library in the cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.capture.key.fingerprint import NotStorableError, versions
from onnxtrain.capture.stored.graph import from_bytes, to_bytes
from onnxtrain.errors import GraphError
from onnxtrain.graph import sizes, traversal
from onnxtrain.graph.values import ONNX
from onnxtrain.ops.bodies import IR_VERSION, import_opsets
from onnxtrain.ops.definition import OPSET
from onnxtrain.plan.cut import Part
from onnxtrain.system.machine import current_machine

# The files of a request, in a folder of its own, and that of its result.
GRAPH, BESIDE, LIBRARY = "region.onnx", "region.json", "library.so"
LEAST_SIZE = 2  # of open sizes: what is broadcast, and so the code, is another for 0 and 1


class Request:
    """A region to compile.

    Attributes:
        graph: its ONNX file.
        beside: JSON: what the file cannot hold, and the sizes to optimize for.
        key: names the library: what decides the code is hashed.
    """

    def __init__(self, part: Part, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        """Writes the region down.

        Args:
            part: the region.
            shapes: of its inputs, in a usual call.
            device: where it runs.

        Raises:
            GraphError: it holds what cannot be written.
        """
        model = ir.Model(_graph(part), ir_version=IR_VERSION)
        try:
            self.graph, known = to_bytes(model)
        except NotStorableError as error:
            raise GraphError("the region cannot be written to a file", got=error) from error
        threads = torch.get_num_threads()
        beside = {"known": known, "shapes": [list(s) for s in shapes], "threads": threads, "device": str(device)}
        self.beside = json.dumps(beside)
        # Without the shapes: sizes of another first call give the same library.
        told = json.dumps([known, threads, current_machine().code_target, _kind(device), *versions()])
        self.key = hashlib.sha256(self.graph + b"\0" + told.encode()).hexdigest()[:24]

    def write(self, folder: Path) -> None:
        folder.joinpath(GRAPH).write_bytes(self.graph)
        folder.joinpath(BESIDE).write_text(self.beside, encoding="utf-8")


def _kind(device: torch.device) -> tuple[str, ...]:
    """What a library for a device runs on: every one of this kind."""
    if device.type == "cpu":
        return ("cpu",)
    return (device.type, torch.cuda.get_device_name(device), f"{torch.version.cuda} {torch.version.hip}")


def read(folder: Path) -> tuple[ir.Model, dict[str, Any]]:
    """What `write` wrote: the graph, and the JSON."""
    beside = json.loads(folder.joinpath(BESIDE).read_text(encoding="utf-8"))
    return from_bytes(folder.joinpath(GRAPH).read_bytes(), beside["known"]), beside


def _graph(part: Part) -> ir.Graph:
    """The region's nodes as a graph of their own, with names that do not depend on the model that it comes from."""
    values = {value: traversal.clone_value(value) for value in part.inputs}
    read = dict.fromkeys(v for node in part.nodes for v in node.inputs)
    constants = [v for v in read if v is not None and v.const_value is not None]
    values |= {value: traversal.clone_value(value) for value in constants}
    graph = ir.Graph([values[v] for v in part.inputs], [], nodes=(), name="region", opset_imports={ONNX: OPSET})
    for node in part.nodes:
        copy = traversal.clone_node(node, values)
        copy.name = ""
        copy.metadata_props.clear()
        graph.append(copy)
    numbered = [values[v] for v in (*part.inputs, *constants)] + [v for node in graph for v in node.outputs]
    symbols: dict[str, str] = {}
    for number, value in enumerate(numbered):
        value.name = f"v{number}"
        value.metadata_props.clear()
        value.meta.pop("sizes", None)  # of the model
        own = [d if isinstance(d, int) else symbols.setdefault(d, f"s{len(symbols)}") for d in sizes.dims_of(value)]
        value.shape = sizes.shape(own)
    for value in constants:
        graph.register_initializer(values[value])
    graph.outputs.extend(values[v] for v in part.outputs if v is not None)
    traversal.name_uniquely(graph)
    import_opsets(graph)
    return graph
