"""User graph optimizers on the joint graph: selection, order, effect on the program, and refused changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import GraphProto, helper

from onnxtrain import DebugOptions, ORTModule
from onnxtrain.dropin.graph_matcher import GraphMatcher, check_attribute_value, make_constant_node, update_graph
from onnxtrain.errors import GraphError
from onnxtrain.passes import user_graph_optimizers
from onnxtrain.passes.user_graph_optimizers import register_graph_optimizer
from tests.reference import assert_matches


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_graph_optimizers, "_REGISTERED", [])


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Dropout(0.0), torch.nn.Linear(8, 3))


def gradients(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(module(x).square().sum(), [*module.parameters()])


def trains_as_eager(plain: torch.nn.Module, model: ORTModule) -> None:
    for batch in (5, 3):
        x = torch.randn(batch, 4)
        assert_matches(gradients(model, x), gradients, plain, x)


def relu_as_max(graph: GraphProto) -> None:
    for (relu,) in GraphMatcher(graph).match_pattern([("Relu", False, [])]):
        zero = make_constant_node("zero", onnx.TensorProto.FLOAT, [], [0.0])
        maximum = helper.make_node("Max", [relu.input[0], "zero"], list(relu.output), name="as_max")
        update_graph(graph, [relu], [zero, maximum])


def relu_again_in_backward(graph: GraphProto) -> None:
    """Recompute in backward the values of forward that it reads."""
    for (node,) in GraphMatcher(graph).match_pattern([("ReluGrad", False, [])]):
        again = helper.make_node("Relu", [node.input[1]], ["relu_again"], name="again")
        changed = copy.deepcopy(node)
        changed.input[1] = "relu_again"
        update_graph(graph, [node], [again, changed])


def test_optimizers_change_the_program_and_the_saved_graph(tmp_path: Path) -> None:
    register_graph_optimizer()(relu_as_max)
    register_graph_optimizer()(relu_again_in_backward)
    plain = net()
    model = ORTModule(copy.deepcopy(plain), DebugOptions(save_onnx=True, onnx_prefix="n", save_path=tmp_path))
    trains_as_eager(plain, model)
    before, after = (
        [node.op_type for node in onnx.load(tmp_path / f"n_{stage}_training.onnx").graph.node]
        for stage in ("optimized", "execution_model")
    )
    assert before.count("Relu") == 1
    assert "Max" not in before
    assert (after.count("Max"), after.count("Relu")) == (1, 1)
    assert "user-functions" in [stage.name for stage in model.report().stages]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class WithFunction(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(self.net(x))


def test_python_objects_in_the_graph_survive_an_optimizer() -> None:
    register_graph_optimizer()(relu_as_max)
    plain = WithFunction()
    trains_as_eager(
        plain, ORTModule(copy.deepcopy(plain))
    )  # the graph contains a Python object, which a protobuf cannot


def test_without_a_change_the_graph_is_the_same() -> None:
    register_graph_optimizer()(lambda graph: None)
    plain = net()
    trains_as_eager(plain, ORTModule(copy.deepcopy(plain)))


def test_optimizers_are_selected_and_ordered() -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[[GraphProto], None]:
        return lambda graph: calls.append(name)

    for name, arguments in {
        "first": {"priority": 5},
        "other model": {"target_modules": "Bert|Roberta"},
        "this model": {"target_modules": "Bert|Sequential", "priority": 1},
        "gpu": {"devices": "cuda"},
        "cpu": {"devices": "cuda|cpu"},
    }.items():
        register_graph_optimizer(**arguments)(noting(name))
    model = ORTModule(net())
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert not calls  # there is no gradient to build
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["first", "this model", "cpu"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda graph: graph.output.pop(), "outputs"),
        (lambda graph: graph.node.extend([helper.make_node("Relu", ["nothing"], ["y"])]), "nothing"),
        (lambda graph: graph.node.extend([helper.make_node("Quux", [graph.input[0].name], ["y"])]), "Quux"),
        (lambda graph: graph.node.remove(graph.node[0]), "still read"),
    ],
)
def test_malformed_changes_are_refused(change: Callable[[GraphProto], None], named: str) -> None:
    register_graph_optimizer()(change)
    with pytest.raises(GraphError, match=named):
        ORTModule(net())(torch.randn(2, 4))


# The matcher


def small_graph() -> GraphProto:
    return onnx.parser.parse_graph(
        """
        g (float[N, 4] x, float[4] w) => (float[N, 4] out) <float[4] ones = {1, 1, 1, 1}, float half = {0.5}> {
            two = Constant <value = float {2.0}> ()
            a = Mul(x, w)
            b = Add(a, ones)
            c = Mul(b, two)
            s = Softmax <axis = -1> (c)
            out = Mul(s, half)
        }
        """
    )


def test_matching_by_producers_and_consumers() -> None:
    matcher = GraphMatcher(small_graph())
    scaled = [("Add", False, []), ("Mul", True, [(0, 0, 0)]), ("Mul", False, [(0, 0, 0)])]
    pattern = [*scaled, ("Softmax", False, [(2, 0, 0)])]
    ((add, before, after, softmax),) = matcher.match_pattern(pattern)
    assert [n.output[0] for n in (add, before, after, softmax)] == ["b", "a", "c", "s"]
    assert len(matcher.match_pattern([("Mul", False, [])])) == 3
    assert matcher.match_pattern([("Add", False, []), ("Softmax", False, [(0, 0, 0)])]) == []


def test_graph_lookups() -> None:
    matcher = GraphMatcher(small_graph())
    producer, consumer = matcher.get_producer("b", "Add", 0), matcher.get_consumer("b", "Mul", 0)
    assert producer is not None
    assert consumer is not None
    assert (producer.output[0], consumer.output[0]) == ("b", "c")
    assert matcher.get_producer("b", "Mul", 0) is None
    assert matcher.get_consumer("b", "Mul", 1) is None
    assert matcher.get_constant_value("two") == 2.0
    assert matcher.get_constant_value("half") == 0.5
    assert matcher.get_constant_value("ones") == [1, 1, 1, 1]
    assert matcher.get_constant_value("x") is None
    assert matcher.get_type_and_shape("x") == (onnx.TensorProto.FLOAT, ["N", 4])
    assert matcher.get_type_and_shape("ones") == (onnx.TensorProto.FLOAT, [4])
    assert matcher.get_type_and_shape("a") == (None, None)
    softmax = matcher.get_producer("s", "Softmax", 0)
    assert softmax is not None
    assert check_attribute_value(softmax, "axis", -1)
    assert not check_attribute_value(softmax, "axis", 0)
    assert not check_attribute_value(softmax, "mode", "x")
