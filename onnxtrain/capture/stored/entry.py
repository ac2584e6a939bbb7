"""Convert a capture to the bytes of a file and back.

The file is a zip with `graph.onnx`, which opens in Netron, and `capture.json`. Loading a file runs no code from it, and
instantiates only classes that an output may have.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy

from onnxtrain.capture.capture import Captured, Mutation
from onnxtrain.capture.effects.assigned_attributes import AssignedAttributes
from onnxtrain.capture.effects.written_views import WrittenView
from onnxtrain.capture.guards.guards import Guards, StoredGuards
from onnxtrain.capture.input_origins import Source
from onnxtrain.capture.key.executed_code import Files, Globals
from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.capture.stored import expressions, graph
from onnxtrain.capture.stored.containers import output_from_json, output_to_json

FORMAT = 4  # files of another format are not loaded
_GRAPH, _CAPTURE = "graph.onnx", "capture.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed time, so that equal captures give equal bytes


@dataclass(frozen=True)
class Conditions:
    """The state, besides the key, that a capture depends on.

    Attributes:
        reads: the attributes that forward read, as paths of modules and names.
        state: a digest of these attributes, the parameters and the buffers.
        names: the parameters, buffers and tensor attributes that are inputs of the graph.
        files: the hashes of the source files whose code ran.
        values: for each Python module, digests of the values of the global names that the code used.
    """

    reads: tuple[tuple[str, str], ...]
    state: str
    names: tuple[str, ...]
    files: Files
    values: Globals


def to_bytes(captured: Captured, conditions: Conditions) -> bytes:
    """Return the contents of the file.

    Raises:
        NotStorableError: the capture holds an object that exists only in this process.
    """
    model, graph_extra = graph.to_bytes(captured.model)
    parts = {
        "format": FORMAT,
        "conditions": asdict(conditions),
        "sources": [asdict(source) for source in captured.sources],
        "results": captured.result_count,
        "mutations": [asdict(mutation) for mutation in captured.mutations],
        "written_views": [asdict(view) for view in captured.written_views],
        "sizes": captured.sizes,
        "assigned": {
            "targets": captured.assigned.targets,
            "values": output_to_json(captured.assigned.values),
            "sizes": captured.assigned.sizes,
        },
        "output": output_to_json(captured.output),
        "guards": _guards_to_json(captured.guards.to_stored()),
        "graph_extra": graph_extra,
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(_CAPTURE, _EPOCH), json.dumps(parts, sort_keys=True))
        archive.writestr(zipfile.ZipInfo(_GRAPH, _EPOCH), model)
    return file.getvalue()


class Entry:
    """The contents of a file: its conditions and guards, and the capture, which is loaded on request.

    Args:
        data: the bytes of the file.

    Raises:
        Exception: the file is corrupt or of another format; of any type that a parser raises.
    """

    def __init__(self, data: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        self._parts = json.loads(self._archive.read(_CAPTURE))
        if self._parts["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {self._parts['format']}")
        parts: Mapping[str, Any] = self._parts["conditions"]
        reads = tuple((str(path), str(name)) for path, name in parts["reads"])
        self.conditions = Conditions(reads, str(parts["state"]), tuple(parts["names"]), parts["files"], parts["values"])
        self.guards = _guards_from_json(self._parts["guards"])

    def captured(self, reads: frozenset[tuple[int, str]], name: str) -> Captured:
        """Load the capture.

        Args:
            reads: the attributes that forward read, with the ids of the modules in this process.
            name: the name of the file.
        """
        parts = self._parts
        return Captured(
            model=graph.from_bytes(self._archive.read(_GRAPH), parts["graph_extra"]),
            sources=tuple(Source(**source) for source in parts["sources"]),
            result_count=parts["results"],
            mutations=tuple(Mutation(**mutation) for mutation in parts["mutations"]),
            written_views=tuple(map(_written_view, parts["written_views"])),
            sizes=tuple(parts["sizes"]),
            output=output_from_json(parts["output"]),
            guards=self.guards,
            assigned=_assigned(parts["assigned"]),
            reads=reads,
            stored_name=name,
        )


def _written_view(parts: Mapping[str, Any]) -> WrittenView:
    strides = parts["target_strides"]
    target_strides = None if strides is None else tuple(strides)
    return WrittenView(parts["result"], parts["target"], target_strides, tuple(parts["strides"]), parts["offset"])


def _assigned(parts: Mapping[str, Any]) -> AssignedAttributes:
    targets = tuple((str(path), str(name)) for path, name in parts["targets"])
    return AssignedAttributes(targets, output_from_json(parts["values"]), tuple(parts["sizes"]))


def _guards_to_json(stored: StoredGuards) -> Any:
    input_symbols = set(stored.symbols)
    sizes = [size for shape in stored.shapes for size in shape if not isinstance(size, int)]
    for expr in (*sizes, *(expr for expr, _ in stored.conditions)):
        if not expr.free_symbols <= input_symbols:
            raise NotStorableError(f"a condition on sizes depends on {expr}, which is not a size of an input")
    return {
        "names": stored.names,
        "symbols": [[str(symbol), *axis] for symbol, axis in stored.symbols.items()],
        "shapes": [[s if isinstance(s, int) else expressions.to_json(s) for s in shape] for shape in stored.shapes],
        "conditions": [[expressions.to_json(expr), soft] for expr, soft in stored.conditions],
        "proven": stored.proven,
    }


def _guards_from_json(parts: Any) -> Guards:
    symbols = {str(name): sympy.Symbol(str(name), integer=True, positive=True) for name, _, _ in parts["symbols"]}
    shapes = [
        [s if isinstance(s, int) else expressions.from_json(s, symbols) for s in shape] for shape in parts["shapes"]
    ]
    stored = StoredGuards(
        names=tuple(map(str, parts["names"])),
        shapes=shapes,
        symbols={symbols[str(name)]: (int(tensor), int(axis)) for name, tensor, axis in parts["symbols"]},
        conditions=[(expressions.from_json(expr, symbols), bool(soft)) for expr, soft in parts["conditions"]],
        proven=tuple(tuple(map(tuple, sizes)) for sizes in parts["proven"]),
    )
    return Guards.from_stored(stored)
