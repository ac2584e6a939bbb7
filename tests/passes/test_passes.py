"""The clean-up passes: what they rewrite, what they leave alone, and what they report."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

from onnxtrain.execute.program import Program
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.passes import FORWARD, optimize
from onnxtrain.passes.changes import Changes
from onnxtrain.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxtrain.passes.eliminate_dead_code import eliminate_dead_code
from onnxtrain.passes.fold_constants import MAX_BYTES, fold_constants
from onnxtrain.passes.remove_identities import remove_identities
from onnxtrain.passes.remove_reshape_copies import remove_reshape_copies
from onnxtrain.plan.cut import single_part
from tests.reference import assert_matches


@pytest.fixture
def op() -> Builder:
    x = ir.Value(name="x")
    set_type(x, TensorType(ir.DataType.FLOAT, ("b", 4)))
    return builder(ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="g"))


def ops_of(graph: ir.Graph) -> list[str]:
    return [node.op_type for node in graph]


def run(graph: ir.Graph, *tensors: torch.Tensor) -> list[torch.Tensor]:
    results, _ = Program(single_part(ir.Model(graph, ir_version=10)), "test", torch.device("cpu")).run(tensors, ())
    return list(results)


def finish(op: Builder, *outputs: ir.Value) -> ir.Graph:
    op.graph.outputs.extend(outputs)
    return op.graph


def test_equal_nodes_become_one(op: Builder) -> None:
    (x,) = op.graph.inputs
    a, b = op.Exp(x), op.Exp(x)
    graph = finish(op, op.Mul(a, b))
    changes = Changes("eliminate_common_subexpressions")
    eliminate_common_subexpressions(graph, changes)
    assert ops_of(graph) == ["Exp", "Mul"]
    assert changes.applied == ["merged 1 duplicate node"]
    product = next(node for node in graph if node.op_type == "Mul")
    assert product.inputs[0] is product.inputs[1] is a


def test_different_attributes_inputs_and_outputs_stay(op: Builder) -> None:
    (x,) = op.graph.inputs
    graph = finish(op, op.Exp(x), op.Exp(x), op.Transpose(x, perm=(1, 0)), op.Transpose(x, perm=(0, 1)), op.Neg(x))
    eliminate_common_subexpressions(graph, Changes())
    assert len(graph) == 5


def test_nodes_with_the_attributes_of_any_earlier_node_become_that_node(op: Builder) -> None:
    (x,) = op.graph.inputs
    swapped, kept, swapped_again, kept_again = (op.Transpose(x, perm=perm) for perm in [(1, 0), (0, 1)] * 2)
    graph = finish(op, op.Concat(swapped, swapped_again, axis=0), op.Add(kept, kept_again))
    eliminate_common_subexpressions(graph, Changes())
    concat, add = graph[2], graph[3]
    assert [*concat.inputs, *add.inputs] == [swapped, swapped, kept, kept]


def test_different_tensors_in_attributes_stay(op: Builder) -> None:
    fills = (np.float32(1), np.float32(2), np.float32(1))
    ones, twos, same = (op.ConstantOfShape(op.constant([4], ir.DataType.INT64), value=ir.tensor([n])) for n in fills)
    graph = finish(op, op.Add(op.Mul(ones, twos), same))
    eliminate_common_subexpressions(graph, Changes())
    assert ops_of(graph).count("ConstantOfShape") == 2


def test_equal_narrow_casts_become_one_after_differentiation_only(op: Builder) -> None:
    """Merged before, the gradients of their readers would be summed in the narrower type."""
    (x,) = op.graph.inputs
    a, b = op.Cast(x, to=ir.DataType.FLOAT16), op.Cast(x, to=ir.DataType.FLOAT16)
    graph = finish(op, op.Mul(a, b))
    eliminate_common_subexpressions(graph, Changes())
    assert ops_of(graph) == ["Cast", "Cast", "Mul"]
    graph[-1].metadata_props["gradient_of"] = "y"
    eliminate_common_subexpressions(graph, Changes())
    assert ops_of(graph) == ["Cast", "Mul"]


def test_equal_wide_casts_become_one(op: Builder) -> None:
    (x,) = op.graph.inputs
    graph = finish(op, op.Mul(op.Cast(x, to=ir.DataType.DOUBLE), op.Cast(x, to=ir.DataType.DOUBLE)))
    eliminate_common_subexpressions(graph, Changes())
    assert ops_of(graph) == ["Cast", "Mul"]


def test_a_backward_node_is_not_merged_with_a_forward_one(op: Builder) -> None:
    """Backward would keep the forward value alive instead of computing it again."""
    (x,) = op.graph.inputs
    forward, first, second = op.Exp(x), op.Exp(x), op.Exp(x)
    for value in (first, second):
        node = value.producer()
        assert node is not None
        node.metadata_props["gradient_of"] = "y"
    graph = finish(op, op.Neg(forward), op.Mul(first, second))
    eliminate_common_subexpressions(graph, Changes())
    assert ops_of(graph) == ["Exp", "Exp", "Neg", "Mul"]


def test_two_dropouts_of_one_tensor_stay_two(op: Builder) -> None:
    """The trap of ONNX's stock pass: one mask for two Dropouts."""
    (x,) = op.graph.inputs
    ratio, training = op.scalar(0.5, ir.DataType.FLOAT), op.scalar(True, ir.DataType.BOOL)
    (a, _), (b, _) = op.Dropout(x, ratio, training), op.Dropout(x, ratio, training)
    graph = finish(op, op.Sub(a, b))
    optimize(ir.Model(graph, ir_version=10), FORWARD)
    assert ops_of(graph).count("Dropout") == 2
    torch.manual_seed(0)
    (difference,) = run(graph, torch.ones(50, 4))
    assert difference.abs().sum() > 0


def test_a_dead_random_node_stays_and_a_dead_pure_node_is_removed(op: Builder) -> None:
    (x,) = op.graph.inputs
    op.Exp(op.Neg(x))
    op.Dropout(x, op.scalar(0.5, ir.DataType.FLOAT), op.scalar(True, ir.DataType.BOOL))
    graph = finish(op, op.Tanh(x))
    changes = Changes()
    eliminate_dead_code(graph, changes)
    assert ops_of(graph) == ["Dropout", "Tanh"]
    assert changes.applied == ["removed 2 dead nodes"]


def test_identities_are_removed(op: Builder) -> None:
    (x,) = op.graph.inputs
    first = op.Identity(op.Identity(op.Exp(x)))
    graph = finish(op, op.Neg(first), op.Reshape(first, op.constant([-1], ir.DataType.INT64)))
    changes = Changes()
    remove_identities(graph, changes)
    assert ops_of(graph) == ["Exp", "Neg", "Reshape"]
    assert changes.applied == ["removed 2 Identity nodes"]
    assert torch.equal(run(graph, torch.zeros(2, 4))[0], torch.full((2, 4), -1.0))


def test_the_names_of_inputs_and_results_stay(op: Builder) -> None:
    """A result is a tensor of its own: its reader may change it."""
    (x,) = op.graph.inputs
    y = op.Exp(x)
    graph = finish(op, op.Neg(op.Identity(x)), op.Identity(y), y, op.Tanh(op.Identity(y)))
    remove_identities(graph, Changes())
    assert ops_of(graph) == ["Exp", "Identity", "Neg", "Identity", "Identity", "Tanh"]


def test_a_copy_for_a_reshape_is_removed(op: Builder) -> None:
    (x,) = op.graph.inputs
    turned = op.Transpose(op.Exp(x), perm=[1, 0])
    flat = op.Reshape(op.own.Clone(turned, memory_format="contiguous_format"), op.constant([-1], ir.DataType.INT64))
    graph = finish(op, op.Neg(flat))
    changes = Changes()
    remove_reshape_copies(graph, changes)
    assert ops_of(graph) == ["Exp", "Transpose", "Reshape", "Neg"]
    assert changes.applied == ["removed 1 copy before Reshape"]
    given = torch.randn(2, 4)
    assert_matches(run(graph, given)[0], lambda x: -x.exp().t().reshape(-1), given)


def test_copies_of_inputs_and_outputs_stay(op: Builder) -> None:
    """Whoever holds an input or a result may change it."""
    (x,) = op.graph.inputs
    flat, y = op.constant([-1], ir.DataType.INT64), op.Exp(x)
    seen = op.Transpose(y, perm=[1, 0])
    inner = op.Neg(x)
    graph = finish(
        op,
        op.Neg(op.Reshape(op.own.Clone(op.Transpose(x, perm=[1, 0])), flat)),  # of an input
        op.Neg(op.Reshape(op.own.Clone(y), flat)),  # of what is a result through a view
        seen,
        op.Reshape(op.own.Clone(inner), flat),  # a result
        op.own.Clone(inner),
        op.Tanh(op.own.Clone(inner)),  # read by others than a Reshape
    )
    changes = Changes()
    remove_reshape_copies(graph, changes)
    assert ops_of(graph).count("Clone") == 5
    assert not changes.applied


def test_constants_are_folded_by_the_ops_own_kernel(op: Builder) -> None:
    (x,) = op.graph.inputs
    two, half = op.scalar(2.0, x), op.scalar(0.25, x)
    graph = finish(op, op.Add(x, op.Exp(op.Mul(two, half))))
    changes = Changes()
    fold_constants(graph, changes)
    eliminate_dead_code(graph, Changes())
    assert ops_of(graph) == ["Add"]
    assert changes.applied == ["folded 2 constant nodes"]
    assert_matches(run(graph, torch.zeros(2, 4))[0], lambda x: x + (x + 0.5).exp(), torch.zeros(2, 4))


def test_a_large_constant_is_not_folded_and_the_refusal_says_why(op: Builder) -> None:
    (x,) = op.graph.inputs
    rows = MAX_BYTES // 16 + 1
    large = op.Expand(op.scalar(1.0, x), op.sizes([rows, 4]))
    graph = finish(op, op.Add(op.Neg(large), op.ReduceSum(x, op.constant([0, 1], ir.DataType.INT64), keepdims=0)))
    changes = Changes("fold_constants")
    fold_constants(graph, changes)
    assert "Expand" in ops_of(graph)
    assert any("more than" in refusal.reason for refusal in changes.refused)
