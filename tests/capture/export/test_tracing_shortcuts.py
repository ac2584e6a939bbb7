"""What is exported without the work that nobody reads is what PyTorch exports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.node import map_arg
from torch.fx.proxy import TracerBase

from onnxtrain.capture import source_location
from onnxtrain.capture.export.patches import capturing
from onnxtrain.capture.export.tracing_shortcuts import cheap_tracing


class Sizes(nn.Module):
    """Sizes that are computed, compared and put into tensors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        half = x.shape[1] // 2
        if x.shape[0] * 2 > y.shape[0] + 1:
            x = x + 1
        rows = torch.arange(x.shape[1], device=x.device)[:half]
        joined = torch.cat([x[:, :half], x[:, half:].flip(1)], 1)
        folded = y.view(-1, 2 * y.shape[1]).repeat(x.shape[1] % 3 + 1, 1)
        return joined * max(x.shape[0], 3), rows, folded, x.new_full((x.shape[0] - 1, half), 0.5)


class Layers(nn.Module):
    """Convolutions with running statistics, attention, dropout and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.pictures(x).flatten(2).transpose(1, 2)
        h = self.encoder(h)
        h, _ = self.lstm(torch.where(mask.bool()[..., None], h, h.new_zeros(())))
        found: Tensor = torch.nn.functional.gelu(h.mean(1)) ** 2
        return found


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "sizes": (Sizes, (torch.zeros(4, 7), torch.zeros(6, 5))),
    "layers": (Layers, (torch.zeros(2, 3, 9, 11), torch.ones(2, 20))),
}


def export(name: str) -> ExportedProgram:
    make, inputs = CASES[name]
    open_sizes = tuple(dict.fromkeys(range(t.dim()), Dim.AUTO) for t in inputs)
    return torch.export.export(make(), inputs, dynamic_shapes=open_sizes, strict=False)


def described(program: ExportedProgram) -> list[Any]:
    places = {node: place for place, node in enumerate(program.graph.nodes)}
    return [
        (n.op, str(n.target), str(map_arg((n.args, n.kwargs), lambda m: f"%{places[m]}")), values(n)) for n in places
    ]


def computed(program: ExportedProgram) -> list[Any]:
    return [(n.target, values(n)) for n in program.graph.nodes if isinstance(n.meta.get("val"), Tensor)]


def values(node: Node) -> list[Any]:
    found = node.meta.get("val")
    parts = found if isinstance(found, (tuple, list)) else [found]
    return [(str(p.shape), strides(p), p.dtype) if isinstance(p, Tensor) else str(p) for p in parts]


def strides(tensor: Tensor) -> list[int]:
    """As numbers: one stride may be written in several ways, of which Max(1, a * b) for a * b is one."""
    return [n if isinstance(n, int) else n.node.hint for n in tensor.stride()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("functional", [False, True])
def test_the_program_is_pytorchs(name: str, functional: bool) -> None:
    plain = export(name)
    with capturing(), cheap_tracing():
        cheap = export(name)
        if functional:
            cheap = cheap.run_decompositions({})
    if functional:
        plain = plain.run_decompositions({})
    if functional:  # where sizes are computed differs
        assert computed(cheap) == computed(plain)
        return
    assert described(cheap) == described(plain)
    for symbol, values_of in plain.range_constraints.items():
        assert cheap.range_constraints[symbol].lower <= values_of.lower  # PyTorch's own functions ask for more
    pairs = zip(cheap.graph.nodes, plain.graph.nodes, strict=True)
    calls = [(own, theirs) for own, theirs in pairs if own.op == "call_function"]
    lines = [(source_location.of_node(n), source_location.of_node(p)) for n, p in calls]
    assert [own for own, _ in lines] == [theirs for _, theirs in lines]
    assert sum("test_tracing_shortcuts.py" in (own or "") for own, _ in lines) > 5
    assert all((n.stack_trace or "").count("File ") < 2 for n, _ in calls)


def test_the_program_runs_on_other_sizes() -> None:
    with capturing(), cheap_tracing():
        program = export("sizes").module()
    for rows, steps in ((4, 7), (5, 12), (9, 3)):
        x, y = torch.randn(rows, steps), torch.randn(6, 5)
        for found, expected in zip(program(x, y), Sizes()(x, y), strict=True):
            torch.testing.assert_close(found, expected)


def test_a_size_becomes_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    create_node = Graph.create_node

    def noting(graph: Graph, op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        made.append(str(getattr(target, "__name__", target)))
        return create_node(graph, op, target, *args, **kwargs)

    class Repeated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.new_zeros(x.shape[0] * 3)
            for _ in range(20):
                y = y + x.new_full((x.shape[0] * 3 * 1,), 0.5)
            return y

    monkeypatch.setattr(Graph, "create_node", noting)
    counts, programs = [], []
    for shortcuts in (nullcontext(), cheap_tracing()):
        made.clear()
        with capturing(), shortcuts:
            sizes = ({0: Dim.AUTO, 1: Dim.AUTO},)
            programs.append(torch.export.export(Repeated(), (torch.zeros(6, 3),), dynamic_shapes=sizes, strict=False))
        counts.append(made.count("mul"))
    assert described(programs[0]) == described(programs[1])
    assert counts[1] < counts[0] / 2


def test_nothing_is_left_behind_and_other_threads_are_left_alone() -> None:
    before = TracerBase.create_node, SymNode._mul, SymNode.wrap_int  # type: ignore[attr-defined]  # made at run time
    results: list[ExportedProgram] = []
    with capturing(), cheap_tracing():
        thread = threading.Thread(target=lambda: results.append(export("sizes")))
        thread.start()
        thread.join()
    assert (TracerBase.create_node, SymNode._mul, SymNode.wrap_int) == before  # type: ignore[attr-defined]
    assert described(results[0]) == described(export("sizes"))
    assert any("\n" in (n.stack_trace or "") for n in results[0].graph.nodes)
