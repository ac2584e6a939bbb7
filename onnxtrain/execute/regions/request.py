"""A region as bytes that another process can compile; their hash names its library in the cache."""

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

# The files of a request and of its result, in a folder of its own.
GRAPH, METADATA, LIBRARY = "region.onnx", "region.json", "library.so"
MIN_DYNAMIC_SIZE = 2  # of dynamic dimensions: 0 and 1 broadcast differently, and so need other code


class Request:
    """A region to compile.

    Attributes:
        graph: its ONNX file.
        metadata: JSON: values that the file cannot contain, and the sizes to optimize for.
        key: names the library: a hash of everything that determines its code.
    """

    file_prefix, problem = "region", "a fused kernel cannot be built; its operators run unfused"

    def __init__(self, part: Part, shapes: Sequence[Sequence[int]]) -> None:
        """Serialize the region.

        Args:
            part: the region.
            shapes: the shapes of its inputs in a typical call.

        Raises:
            GraphError: the region contains a value that cannot be serialized.
        """
        model = ir.Model(_graph(part), ir_version=IR_VERSION)
        try:
            self.graph, data = to_bytes(model)
        except NotStorableError as error:
            raise GraphError("the region cannot be written to a file", got=error) from error
        threads = torch.get_num_threads()
        metadata = {"kind": "region", "known": data, "shapes": [list(s) for s in shapes], "threads": threads}
        self.metadata = json.dumps(metadata)
        # Without the shapes: the library is the same whatever the sizes of the first call.
        determining = json.dumps([data, threads, current_machine().code_target, *versions()])
        self.key = hashlib.sha256(self.graph + b"\0" + determining.encode()).hexdigest()[:24]

    def write(self, folder: Path) -> None:
        folder.joinpath(GRAPH).write_bytes(self.graph)
        folder.joinpath(METADATA).write_text(self.metadata, encoding="utf-8")


def read_request(folder: Path) -> tuple[ir.Model, dict[str, Any]]:
    """Read the graph and the metadata that `Request.write` wrote."""
    metadata = json.loads(folder.joinpath(METADATA).read_text(encoding="utf-8"))
    return from_bytes(folder.joinpath(GRAPH).read_bytes(), metadata["known"]), metadata


def _graph(part: Part) -> ir.Graph:
    """Return the region's nodes as a graph, with names that do not depend on the model."""
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
        dims = [d if isinstance(d, int) else symbols.setdefault(d, f"s{len(symbols)}") for d in sizes.dims_of(value)]
        value.shape = sizes.shape(dims)
    for value in constants:
        graph.register_initializer(values[value])
    graph.outputs.extend(values[v] for v in part.outputs if v is not None)
    traversal.name_uniquely(graph)
    import_opsets(graph)
    return graph
