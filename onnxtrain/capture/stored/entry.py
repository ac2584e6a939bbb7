"""One capture as the bytes of a file: a zip with `graph.onnx`, which opens in Netron, and `capture.json`.

What is read is data: no part of a file is run, and no class is made that an output may not have.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy

from onnxtrain.capture.capture import Captured, Mutation, Source
from onnxtrain.capture.effects.written_views import WrittenView
from onnxtrain.capture.guards.guards import Guards, StoredGuards
from onnxtrain.capture.key.executed_code import Files, Globals
from onnxtrain.capture.key.fingerprint import NotStorableError
from onnxtrain.capture.stored import expressions, graph
from onnxtrain.capture.stored.containers import output_from_json, output_to_json

FORM = 2  # of the file; another number is not read
_GRAPH, _REST = "graph.onnx", "capture.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same capture gives the same bytes


@dataclass(frozen=True)
class Conditions:
    """What has to be as it was, beside the key, for a capture to be right.

    Attributes:
        reads: the attributes that forward read: paths of modules and names.
        state: a digest of what these attributes, the parameters and buffers were.
        names: the parameters, buffers and tensor attributes that the graph takes.
        files: the hashes of the source files whose code ran.
        values: by module, a digest of what each global name stood for.
    """

    reads: tuple[tuple[str, str], ...]
    state: str
    names: tuple[str, ...]
    files: Files
    values: Globals


def to_bytes(captured: Captured, conditions: Conditions) -> bytes:
    """The file.

    Raises:
        NotStorableError: the capture holds what only this process has.
    """
    model, beside = graph.to_bytes(captured.model)
    rest = {
        "form": FORM,
        "conditions": asdict(conditions),
        "sources": [asdict(source) for source in captured.sources],
        "results": captured.result_count,
        "mutations": [asdict(mutation) for mutation in captured.mutations],
        "written_views": [asdict(view) for view in captured.written_views],
        "sizes": captured.sizes,
        "output": output_to_json(captured.output),
        "guards": _guards_to_json(captured.guards.to_stored()),
        "beside": beside,
    }
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(_REST, _EPOCH), json.dumps(rest, sort_keys=True))
        archive.writestr(zipfile.ZipInfo(_GRAPH, _EPOCH), model)
    return file.getvalue()


class Entry:
    """A file that was read: its conditions, and the capture where it is wanted.

    Raises:
        Exception: the file is damaged, or of another form; any.
    """

    def __init__(self, data: bytes) -> None:
        self._archive = zipfile.ZipFile(io.BytesIO(data))
        self._rest = json.loads(self._archive.read(_REST))
        if self._rest["form"] != FORM:
            raise ValueError(f"its form is {self._rest['form']}, and {FORM} is read")
        found: Mapping[str, Any] = self._rest["conditions"]
        reads = tuple((str(path), str(name)) for path, name in found["reads"])
        self.conditions = Conditions(reads, str(found["state"]), tuple(found["names"]), found["files"], found["values"])
        self.guards = _guards_from_json(self._rest["guards"])

    def captured(self, reads: frozenset[tuple[int, str]], name: str) -> Captured:
        """The capture. `reads`: with the modules' ids in this process; `name`: what the file is called."""
        rest = self._rest
        return Captured(
            model=graph.from_bytes(self._archive.read(_GRAPH), rest["beside"]),
            sources=tuple(Source(**source) for source in rest["sources"]),
            result_count=rest["results"],
            mutations=tuple(Mutation(**mutation) for mutation in rest["mutations"]),
            written_views=tuple(map(_written_view, rest["written_views"])),
            sizes=tuple(rest["sizes"]),
            output=output_from_json(rest["output"]),
            guards=self.guards,
            reads=reads,
            stored_name=name,
        )


def _written_view(parts: Mapping[str, Any]) -> WrittenView:
    known = parts["target_strides"]
    target_strides = None if known is None else tuple(known)
    return WrittenView(parts["result"], parts["target"], target_strides, tuple(parts["strides"]), parts["offset"])


def _guards_to_json(stored: StoredGuards) -> Any:
    own = set(stored.symbols)
    sizes = [size for shape in stored.shapes for size in shape if not isinstance(size, int)]
    for expr in (*sizes, *(expr for expr, _ in stored.conditions)):
        if not expr.free_symbols <= own:
            raise NotStorableError(f"a condition on sizes is about {expr}, which is no size of an input")
    return {
        "names": stored.names,
        "symbols": [[str(symbol), *place] for symbol, place in stored.symbols.items()],
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
