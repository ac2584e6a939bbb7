"""An export with the tracing shortcuts is the program that PyTorch exports without them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
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
from onnxtrain.capture.export.tracing_shortcuts import _solve_equations, tracing_shortcuts
from onnxtrain.torch_compat.decompositions import all_composites
from tests.thinned import slow_except


class Sizes(nn.Module):
    """A module that computes with sizes, compares them and puts them into tensors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        half = x.shape[1] // 2
        if x.shape[0] * 2 > y.shape[0] + 1:
            x = x + 1
        rows = torch.arange(x.shape[1], device=x.device)[:half]
        joined = torch.cat([x[:, :half], x[:, half:].flip(1)], 1)
        folded = y.view(-1, 2 * y.shape[1]).repeat(x.shape[1] % 3 + 1, 1)
        return joined * max(x.shape[0], 3), rows, folded, x.new_full((x.shape[0] - 1, half), 0.5)


class Layers(nn.Module):
    """A convolution, batch norm, attention, dropout and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.lstm = nn.LSTM(8, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.convolutions(x).flatten(2).transpose(1, 2)
        h = self.encoder(h)
        h, _ = self.lstm(torch.where(mask.bool()[..., None], h, h.new_zeros(())))
        y: Tensor = torch.nn.functional.gelu(h.mean(1)) ** 2
        return y


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "sizes": (Sizes, (torch.zeros(4, 7), torch.zeros(6, 5))),
    "layers": (Layers, (torch.zeros(2, 3, 5, 7), torch.ones(2, 6))),
}


def export(name: str) -> ExportedProgram:
    make, inputs = CASES[name]
    dynamic_shapes = tuple(dict.fromkeys(range(t.dim()), Dim.AUTO) for t in inputs)
    return torch.export.export(make(), inputs, dynamic_shapes=dynamic_shapes, strict=False)


def describe(program: ExportedProgram) -> list[Any]:
    index_of = {node: index for index, node in enumerate(program.graph.nodes)}
    return [
        (n.op, str(n.target), str(map_arg((n.args, n.kwargs), lambda m: f"%{index_of[m]}")), values(n))
        for n in index_of
    ]


def tensor_nodes(program: ExportedProgram) -> list[Any]:
    return [(n.target, values(n)) for n in program.graph.nodes if isinstance(n.meta.get("val"), Tensor)]


def values(node: Node) -> list[Any]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (tuple, list)) else [value]
    return [(str(p.shape), strides(p), p.dtype) if isinstance(p, Tensor) else str(p) for p in parts]


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of the example, because equal expressions may differ in form: Max(1, a * b) and a * b."""
    return [n if isinstance(n, int) else n.node.hint for n in tensor.stride()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("functional", slow_except([False, True], False))
def test_the_program_matches_pytorchs(name: str, functional: bool) -> None:
    expected = export(name)
    with capturing(), tracing_shortcuts():
        actual = export(name)
        if functional:
            actual = actual.run_decompositions({})
    if functional:
        expected = expected.run_decompositions({})
    if functional:  # the nodes that compute sizes come at other positions
        assert tensor_nodes(actual) == tensor_nodes(expected)
        return
    assert describe(actual) == describe(expected)
    for symbol, bounds in expected.range_constraints.items():
        assert actual.range_constraints[symbol].lower <= bounds.lower  # PyTorch's own functions require more
    pairs = zip(actual.graph.nodes, expected.graph.nodes, strict=True)
    calls = [(a, e) for a, e in pairs if a.op == "call_function"]
    lines = [(source_location.of_node(a), source_location.of_node(e)) for a, e in calls]
    assert [a for a, _ in lines] == [e for _, e in lines]
    assert sum("test_tracing_shortcuts.py" in (a or "") for a, _ in lines) > 5
    assert all((a.stack_trace or "").count("File ") < 2 for a, _ in calls)


def test_the_program_runs_on_other_sizes() -> None:
    with capturing(), tracing_shortcuts():
        program = export("sizes").module()
    for rows, steps in ((4, 7), (5, 12), (9, 3)):
        x, y = torch.randn(rows, steps), torch.randn(6, 5)
        assert all(torch.equal(*pair) for pair in zip(program(x, y), Sizes()(x, y), strict=True))


def test_a_repeated_size_becomes_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    targets: list[str] = []
    create_node = Graph.create_node

    def recording(graph: Graph, op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        targets.append(str(getattr(target, "__name__", target)))
        return create_node(graph, op, target, *args, **kwargs)

    class Repeated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.new_zeros(x.shape[0] * 3)
            for _ in range(20):
                y = y + x.new_full((x.shape[0] * 3 * 1,), 0.5)
            return y

    monkeypatch.setattr(Graph, "create_node", recording)
    counts, programs = [], []
    for shortcuts in (nullcontext(), tracing_shortcuts()):
        targets.clear()
        with capturing(), shortcuts:
            sizes = ({0: Dim.AUTO, 1: Dim.AUTO},)
            programs.append(torch.export.export(Repeated(), (torch.zeros(6, 3),), dynamic_shapes=sizes, strict=False))
        counts.append(targets.count("mul"))
    assert describe(programs[0]) == describe(programs[1])
    assert counts[1] < counts[0] / 2


def test_patches_are_undone_and_do_not_affect_other_threads() -> None:
    before = TracerBase.create_node, SymNode._mul  # type: ignore[attr-defined]  # set at run time
    results: list[ExportedProgram] = []
    with capturing(), tracing_shortcuts():
        thread = threading.Thread(target=lambda: results.append(export("sizes")))
        thread.start()
        thread.join()
    assert (TracerBase.create_node, SymNode._mul) == before  # type: ignore[attr-defined]
    assert describe(results[0]) == describe(export("sizes"))
    assert any("\n" in (n.stack_trace or "") for n in results[0].graph.nodes)


def test_kernels_are_registered_as_by_pytorch() -> None:
    operator, key = torch.ops.aten.matmul.default, torch._C.DispatchKey.AutogradHPU
    before = dict(operator.py_kernels)
    register = type(operator).py_impl
    with capturing(), tracing_shortcuts():
        assert type(operator).py_impl is not register
        try:
            assert operator.py_impl(key)(torch.matmul) is torch.matmul
            assert operator.py_kernels == {**before, key: torch.matmul}
            with pytest.raises(RuntimeError, match=r"override a python impl for DispatchKey\.AutogradHPU"):
                operator.py_impl(key)(torch.mm)
        finally:
            del operator.py_kernels[key]
        with pytest.raises(AssertionError, match="expected DispatchKey, got <class 'str'>"):
            operator.py_impl("CPU")(torch.mm)
    assert type(operator).py_impl is register


def test_composites_are_listed_again_when_an_operator_is_defined() -> None:
    name = "tests_of_shortcuts::composite"
    with capturing(), tracing_shortcuts():
        names_before = {op.name() for op in all_composites()}
    with torch.library._scoped_library("tests_of_shortcuts", "DEF") as library:
        library.define("composite(Tensor x) -> Tensor", tags=())
        library.impl("composite", lambda x: x + 1, "CompositeImplicitAutograd")
        with capturing(), tracing_shortcuts():
            assert {op.name() for op in all_composites()} - names_before == {name}


def test_only_equations_between_sizes_are_solved() -> None:
    seen = []
    for symbols in (set(), {"s0"}):
        constraints = SimpleNamespace(_symbols_with_equalities=symbols, _univariate_inequalities={"s0": {"s0 >= 2"}})
        _solve_equations(lambda each: seen.append(each._univariate_inequalities), constraints)
    assert seen == [{}, {"s0": {"s0 >= 2"}}]
