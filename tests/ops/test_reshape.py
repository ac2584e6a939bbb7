"""Captures of PyTorch's functions that move elements, and facts that passes read from their definitions."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import FROM_TORCH, OPS, builder, view
from onnxtrain.ops.reshape.shape import factored
from onnxtrain.ops.symbolic_ints import known_ints
from tests.op_case import Spec
from tests.ops.captures import X, check_capture, check_captures, in_groups

Function = Callable[..., Any]


def write_parts(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Write in place to parts; functionalization makes select_scatter, slice_scatter and index_put of these."""
    z = x.clone()
    z[:, 0] = y
    z[:, 1:3] = z[:, 2:4].clone() * 2
    z[0] = 0.0
    return z


def shift_right(x: torch.Tensor) -> torch.Tensor:
    """Shift tokens as T5 and BART do for decoder inputs."""
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = x[:, :-1].clone()
    shifted[:, 0] = 3
    return shifted


def windows(x: torch.Tensor) -> torch.Tensor:
    """Partition into windows and back, as Swin does."""
    b, h, w, c = x.shape
    parts = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, c)
    return (parts * 2).view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)


FUNCTIONS: dict[str, Function] = {
    "view": lambda x: (x.view(x.size(0), -1), x.view(x.size(0) * x.size(1), 2, -1), x.flatten(), x.flatten(0, 1)),
    "unflatten": lambda x: (x.unflatten(-1, (2, -1)), x.ravel(), x.reshape_as(x.flatten(1))),
    "transpose": lambda x: (x.mT, x.transpose(0, -1), x.permute(2, 0, 1), x.swapaxes(0, 1)),
    "movedim": lambda x: (x.movedim(0, -1), x.movedim((0, 1), (2, 0)), torch.moveaxis(x, 1, 0)),
    "t": lambda x: (x[0].t(), x[0].T, x.mean((0, 1)).t()),
    "squeeze": lambda x: (x.sum(1, keepdim=True).squeeze(1), x.sum((1, 2), keepdim=True).squeeze((1, -1))),
    "squeeze-kept": lambda x: x.squeeze(-1) + x.unsqueeze(0).squeeze(0),
    "unsqueeze": lambda x: (x.unsqueeze(1), x.unsqueeze(-1), x[:, None, :, None]),
    "expand": lambda x: (x.unsqueeze(1).expand(-1, 4, -1, -1), x[:, :1].broadcast_to(2, *x.shape)),
    "expand-as": lambda x: x.mean(1, keepdim=True).expand_as(x) * x,
    "broadcast": lambda x: torch.broadcast_tensors(x.unsqueeze(1), x.mean(0)),
    "meshgrid": lambda x: (
        *torch.meshgrid(x[:, 0, 0], x[0, :, 0], indexing="ij"),
        *torch.meshgrid(x[:, 0, 0], x[0, :, 0], indexing="xy"),
    ),
    "atleast": lambda x: (torch.atleast_2d(x.mean((0, 1))), torch.atleast_3d(x[0])),
    "cat": lambda x: (torch.cat([x, x * 2, x], 1), torch.cat([torch.zeros(0), x], 1), torch.hstack([x, x])),
    "cat-promotes": lambda x: torch.cat([x, torch.ones(1, 1, 1, dtype=torch.int64).expand_as(x)], 0),
    "stack": lambda x: (torch.stack([x, x], -1), torch.dstack([x[0], x[0]]), torch.vstack([x[0, 0], x[0, 1]])),
    "column-stack": lambda x: torch.column_stack([x[0], x[0, :, 0]]),
    "split": lambda x: (*x.split(4, -1), *x.split([1, 3, 2], -1), *x.chunk(4, -1), *x.tensor_split(4, -1)),
    "split-one": lambda x: x.chunk(3, -1)[1] * 2,
    "hsplit": lambda x: (*torch.hsplit(x[0].T, 1), *torch.vsplit(x[0].T, 2)),
    "unbind": lambda x: (*x.unbind(-1)[:2], x[:, :2].unbind(1)[1], sum(x[:, :0].unbind(1), x * 2)),
    "slice": lambda x: (x[:, 1:], x[:, :-1], x[..., ::2], x[..., 1:4], x[:, -2:], x[:, :, -1:]),
    "slice-by-sizes": lambda x: (x[:, : x.size(1) // 2], x[:, x.size(1) - 1 :]),
    "select": lambda x: (x[0], x[:, -1], x[..., 2], x.select(1, 1), x[:, x.size(1) - 1]),
    "narrow": lambda x: (x.narrow(2, 1, 3), x.narrow(1, -3, 2)),
    "flip": lambda x: (x.flip(0), x.flip(0, 2), x.fliplr(), x.flipud()),
    "rot90": lambda x: (x.rot90(), x.rot90(2), x.rot90(3, (1, 2)), x.rot90(4)),
    "repeat": lambda x: (x.repeat(2, 1, 3), x.repeat(2, 1, 1, 1), x.tile(2), x.repeat(1, x.size(1), 1)),
    "repeat-interleave": lambda x: (x.repeat_interleave(3, 1), x.repeat_interleave(2)),
    "pad": lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, -2, 0, 3), value=1.5), F.pad(x, (0, 0, 0, x.size(1)))),
    "pad-repeats": lambda x: (F.pad(x, (1, 2), mode="reflect"), F.pad(x, (1, 0, 2, 1), mode="replicate")),
    "roll": lambda x: (x.roll(1, 1), x.roll((1, -2), (1, 2)), x.roll(3)),
    "triangle": lambda x: (x.tril(), x.triu(1), x.tril(-1)),
    "causal-mask": lambda x: torch.full((x.size(1), x.size(1)), float("-inf")).triu(1) + x @ x.mT,
    "diagonal": lambda x: (x.diagonal(1, 1, 2), x[0].diag(-1), torch.diag_embed(x), torch.diag_embed(x, 1, 0, -1)),
    "unfold": lambda x: (x.unfold(1, 2, 2), x.unfold(-1, 3, 1)),
    "copies": lambda x: (
        torch.ops.aten.view_copy(x, [-1]),
        torch.ops.aten.permute_copy(x, [2, 0, 1]),
        torch.ops.aten.slice_copy(x, 1, 1),
        torch.ops.aten.expand_copy(x[:, :1], [-1, 3, -1]),
    ),
}


OF_ONE_TENSOR = {name: (function, X) for name, function in FUNCTIONS.items()}


@pytest.mark.parametrize("names", in_groups(OF_ONE_TENSOR))
def test_captured_function_matches_eager(names: list[str]) -> None:
    check_captures(OF_ONE_TENSOR, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_function_alone_matches_eager(name: str) -> None:
    check_capture(FUNCTIONS[name])


def test_in_place_writes_to_parts_of_a_tensor() -> None:
    check_capture(write_parts, Spec("b s h"), Spec("b h"))


def test_slice_up_to_a_size_of_another_tensor() -> None:
    check_capture(lambda x, y: x[:, : y.size(1)] * y, Spec("b 9 h"), Spec("b s h"))


def test_scatter_functions() -> None:
    check_capture(
        lambda x, y: (torch.slice_scatter(x, y, 1, 1, -1), torch.select_scatter(x, y[:, 0], 1, -1)),
        Spec("b s h"),
        Spec("b s-2 h"),
        sizes=[{"b": 3, "s": 5, "h": 4}, {"b": 2, "s": 7, "h": 4}],
    )


def test_shift_of_integers() -> None:
    check_capture(shift_right, Spec("b s", "int64", high=9))


def test_window_partition_of_an_image() -> None:
    check_capture(windows, Spec("b h w 3"), sizes=[{"b": 2, "h": 4, "w": 6}, {"b": 3, "h": 8, "w": 2}])


def test_pixel_and_channel_shuffles() -> None:
    check_capture(
        lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 4)),
        Spec("b 8 h w"),
        sizes=[{"b": 2, "h": 4, "w": 6}, {"b": 3, "h": 8, "w": 2}],
    )


def test_bfloat16_keeps_its_dtype() -> None:
    check_capture(lambda x: (F.pad(x, (1, 1), value=0.1), x.repeat(1, 2, 1), x.flip(0)), dtype=torch.bfloat16)


def test_circular_padding() -> None:
    check_capture(lambda x: F.pad(x, (1, 2), mode="circular"))
    check_capture(lambda x: F.pad(x, (-1, 2), mode="circular"), aten=True)


# Errors


def small_graph(*shape: int | str) -> tuple[Any, ir.Value]:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23})
    x = ir.Value(name="x")
    set_type(x, TensorType(ir.DataType.FLOAT, shape))
    graph.inputs.append(x)
    return builder(graph), x


@pytest.mark.parametrize(
    "build",
    [
        lambda op, x: op.Reshape(x, op.sizes([5, 5])),
        lambda op, x: op.Reshape(x, op.sizes([-1, -1])),
        lambda op, x: op.Transpose(x, perm=[0, 0]),
        lambda op, x: op.Squeeze(x, op.sizes([0])),
        lambda op, x: op.Unsqueeze(x, op.sizes([0, 0])),
        lambda op, x: op.Concat(x, op.Squeeze(op.Unsqueeze(x, op.sizes([0])), op.sizes([0])), axis=2),
        lambda op, x: op.Split(x, axis=0, num_outputs=5),
        lambda op, x: op.Slice(x, op.sizes([0]), op.sizes([1]), op.sizes([0]), op.sizes([0])),
        lambda op, x: op.Tile(x, op.sizes([2])),
        lambda op, x: op.Pad(x, op.sizes([0, 0, 1, 1]), mode="mirror"),
    ],
)
def test_invalid_node_raises(build: Function) -> None:
    op, x = small_graph(3, 4)
    with pytest.raises(GraphError):
        build(op, x)


# Facts that passes read


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (("b", "s", 12), ("b*s", 3, 4), "a0 a1 (a2_0 a2_1) -> (a0 a1) a2_0 a2_1"),
        (("b", 1, "s"), ("b", "s"), "a0_0 1 a2_0 -> a0_0 a2_0"),
        ((6, 4, "b"), (4, 6, "b"), "[x0] [x1] a2_0 -> [y0] [y1] a2_0"),
        (("b", 0), (0, "b"), "[x0] [x1] -> [y0] [y1]"),
        (("n",), (), "[x0] -> "),
        ((), ("n",), " -> [y0]"),
    ],
)
def test_axis_map_of_a_reshape(source: Any, target: Any, expected: str) -> None:
    left, right = factored(source, target)
    assert f"{' '.join(left)} -> {' '.join(right)}" == expected


def test_reshape_with_one_symbolic_size_needs_no_size_arithmetic() -> None:
    op, x = small_graph("b", "s", 12)
    capture_view = FROM_TORCH["aten.view.default"]
    op.out = (TensorType(ir.DataType.FLOAT, ("b", "s", 3, 4)),)
    assert len(list(op.graph)) == 0
    capture_view(op, x, ["b", "s", 3, 4])
    assert any(node.op_type == "Shape" for node in op.graph)  # two symbolic sizes: both are read
    op, x = small_graph("b", 12)
    op.out = (TensorType(ir.DataType.FLOAT, ("b", 3, 4)),)
    capture_view(op, x, ["b", 3, 4])
    assert [node.op_type for node in op.graph] == ["Reshape"]


def test_known_ints_evaluates_size_arithmetic() -> None:
    op, x = small_graph("b", "s")
    rows = op.Shape(x, start=0, end=1)
    sizes = op.Concat(op.Mul(rows, op.sizes([2])), op.Shape(x, start=1), axis=0)
    assert known_ints(sizes) == ("2*b", "s")
    assert known_ints(op.Squeeze(op.Slice(sizes, op.sizes([1]), op.sizes([2])), op.sizes([0]))) == ("s",)
    assert known_ints(x) is None


def test_views_declare_their_alias() -> None:
    """Kernels of these ops return views, and the definitions say so."""
    op, x = small_graph(4, 1, 6)
    vector = op.sizes
    nodes = [
        op.Reshape(x, vector([4, 6])),
        op.Transpose(x, perm=[2, 0, 1]),
        op.Squeeze(x, vector([1])),
        op.Unsqueeze(x, vector([0])),
        op.Expand(x, vector([4, 5, 6])),
        op.Slice(x, vector([1]), vector([3])),
        op.Split(x, axis=0, num_outputs=2)[0],
        op.own.Diagonal(x),
        op.own.Unfold(x, axis=0, size=2, step=1),
    ]
    tensor = torch.randn(4, 1, 6)
    for value in nodes:
        node = value.producer()
        definition = OPS[node.domain, node.op_type]
        kernel = definition.kernel(node, "cpu")
        arguments: list[Any] = [tensor]
        for index, operand in enumerate(node.inputs[1:], 1):
            integers = known_ints(operand)
            if index in kernel.host_inputs:
                arguments.append(integers[0] if len(operand.shape) == 0 else integers)
        arguments += [None] * (len(definition.inputs) - len(arguments))
        result = kernel.lower(view(node), *arguments).evaluate()
        result = result[0] if isinstance(result, (tuple, list)) else result
        shares = result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert shares, definition.name
        assert definition.aliases == {0: 0}, definition.name


@pytest.mark.parametrize("cut", [lambda y: y[:, :, 1:8], lambda y: y[..., 0:4], lambda y: y[:, 1:5:2]])
def test_a_slice_with_a_positive_step_copies_nothing(cut):
    class Cuts(torch.nn.Module):
        def forward(self, x):
            hidden = torch.relu(x)
            return hidden, cut(hidden)

    x = torch.randn(2, 6, 8, 5)
    hidden_states, part = ORTModule(Cuts(), fallback_policy="FALLBACK_DISABLE")(x)
    assert torch.equal(part, cut(x.relu()))
    assert part.untyped_storage().data_ptr() == hidden_states.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "join",
    [
        lambda x: torch.cat([x]),
        lambda x: torch.cat([torch.tensor([]), x], -2),
        lambda x: torch.stack([x]),
        lambda x: torch.hstack([x]),
        lambda x: torch.vstack([x]),
        lambda x: torch.dstack([x]),
        lambda x: torch.column_stack([x]),
    ],
    ids=["cat", "cat with an empty vector", "stack", "hstack", "vstack", "dstack", "column_stack"],
)
def test_joining_a_single_tensor_copies_it(join: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The result is contiguous, and writing to it does not change the input."""

    class Join(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return join(x.mT)

    x = torch.randn(2, 3, 4, requires_grad=True)
    expected, got = join(x.mT), ORTModule(Join())(x)
    assert torch.equal(got, expected)
    assert got.stride() == expected.stride()
    assert got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(y, x, cotangent)[0] for y in (expected, got)]
    assert torch.equal(*gradients)
