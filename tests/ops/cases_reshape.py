"""Cases of the ops that move elements, with PyTorch's functions as references."""

from typing import Any

import torch

from tests.op_case import OpCase, SizesOf, Spec

OWN, MS = "onnxtrain", "com.microsoft"
TO_LAST, TO_FIRST = 2**63 - 1, -(2**63)  # as ends of slices: including the last or first element


def ints(*values: int) -> Spec:
    return Spec(str(len(values)), "int64", value=list(values))


def int_vector(tensor: torch.Tensor) -> list[int]:
    return [int(v) for v in tensor]


def subscript(rank: int, starts: Any, ends: Any, axes: Any, steps: Any) -> tuple[slice, ...]:
    slices = [slice(None)] * rank
    bounds = [int_vector(v) for v in (axes, starts, ends, steps)]
    for axis, start, end, step in zip(*bounds, strict=True):
        slices[axis] = slice(start, end, step)
    return tuple(slices)


def slice_grad(dy: Any, shape: Any, *bounds: Any) -> Any:
    dx = torch.zeros(shape, dtype=dy.dtype)
    dx[subscript(len(shape), bounds[0], bounds[1], bounds[2], bounds[3])] = dy
    return dx


def slice_scatter(x: Any, updates: Any, starts: Any, ends: Any, axes: Any, steps: Any) -> Any:
    y = x.clone()
    y[subscript(x.dim(), starts, ends, axes, steps)] = updates
    return y


def embed(d: Any, shape: Any) -> Any:
    """Embed d as the diagonal above the main one, in the first and last of three axes."""
    y = torch.zeros(shape, dtype=d.dtype)
    torch.diagonal(y, 1, 0, 2).copy_(d)
    return y


def unfold_grad(dy: Any, shape: Any) -> Any:
    x = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
    return torch.autograd.grad(x.unfold(1, 3, 2), x, dy)[0]


def pad_grad(mode: str, pads: tuple[int, ...]) -> Any:
    def reference(dy: Any, shape: Any, *_: Any) -> Any:
        x = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
        return torch.autograd.grad(torch.nn.functional.pad(x, pads, mode), x, dy)[0]

    return reference


CASES = [
    # Shape and Reshape
    OpCase("", "Shape", (Spec("b s 4"),), lambda x: torch.tensor(x.shape)),
    OpCase("", "Shape", (Spec("b s 4"),), lambda x: torch.tensor(x.shape[1:]), {"start": 1}, label="rest"),
    OpCase(
        "", "Shape", (Spec("b s 4"),), lambda x: torch.tensor(x.shape[-3:-1]), {"start": -3, "end": -1}, label="part"
    ),
    OpCase("", "Reshape", (Spec("b s 12"), SizesOf("b*s 3 4")), lambda x, shape: x.reshape(shape), {"allowzero": 1}),
    OpCase(
        "",
        "Reshape",
        (Spec("b s h"), SizesOf("b s*h")),
        lambda x, shape: x.reshape(shape),
        {"allowzero": 1},
        label="merge",
    ),
    OpCase("", "Reshape", (Spec("b 12"), ints(-1, 4, 3)), lambda x, shape: x.reshape(-1, 4, 3), label="inferred"),
    OpCase("", "Reshape", (Spec("b 6 4"), ints(0, 0, 2, 2)), lambda x, shape: x.reshape(-1, 6, 2, 2), label="copied"),
    OpCase(
        "",
        "Reshape",
        (Spec("6 4 b"), SizesOf("4 6 b")),
        lambda x, shape: x.reshape(shape),
        {"allowzero": 1},
        label="mixed",
    ),
    OpCase("", "Reshape", (Spec("1 1"), ints()), lambda x, shape: x.reshape(()), label="scalar"),
    # Transpose, Squeeze, Unsqueeze, Expand
    OpCase("", "Transpose", (Spec("b s h"),), lambda x: x.permute(2, 0, 1), {"perm": [2, 0, 1]}),
    OpCase("", "Transpose", (Spec("b s h"),), lambda x: x.permute(2, 1, 0), label="reversed"),
    OpCase("", "Squeeze", (Spec("b 1 s 1"), ints(1, -1)), lambda x, axes: x[:, 0, :, 0]),
    OpCase("", "Squeeze", (Spec("1 b 1"), ints(0)), lambda x, axes: x[0], label="one"),
    OpCase("", "Squeeze", (Spec("1 4 1"),), torch.squeeze, label="all"),
    OpCase("", "Unsqueeze", (Spec("b s"), ints(0, -1)), lambda x, axes: x[None, :, :, None]),
    OpCase("", "Unsqueeze", (Spec(""), ints(0)), lambda x, axes: x[None], label="scalar"),
    OpCase("", "Expand", (Spec("s 1"), SizesOf("2*s s 4")), lambda x, shape: x.expand(shape)),
    OpCase("", "Expand", (Spec("b s"), ints(1, 1)), lambda x, shape: x, label="onto-ones"),
    OpCase("", "Expand", (Spec(""), SizesOf("2 3")), lambda x, shape: x.expand(shape), label="scalar"),
    # Concat and Split
    OpCase("", "Concat", (Spec("b s h"), Spec("b t h"), Spec("b 2 h")), lambda *xs: torch.cat(xs, 1), {"axis": 1}),
    OpCase("", "Concat", (Spec("b"), Spec("3")), lambda *xs: torch.cat(xs, -1), {"axis": -1}, label="vectors"),
    OpCase("", "Concat", (Spec("b s"),), lambda x: x, {"axis": 0}, label="one"),
    OpCase("", "Split", (Spec("b 6 s"),), lambda x: x.split(2, 1), {"axis": 1, "num_outputs": 3}),
    OpCase("", "Split", (Spec("b 7 s"),), lambda x: x.split(3, 1), {"axis": 1, "num_outputs": 3}, label="uneven"),
    OpCase(
        "",
        "Split",
        (Spec("b 7 s"), Spec("3", "int64", value=[2, 4, 1])),
        lambda x, _: x.split([2, 4, 1], 1),
        {"axis": 1},
        label="lengths",
    ),
    OpCase(
        "",
        "Split",
        (Spec("5 s"),),
        lambda x: (x[:2], None, x[4:]),
        {"axis": 0, "num_outputs": 3},
        label="uneven",
    ),
    # Slices
    OpCase("", "Slice", (Spec("b s h"), ints(1), ints(3), ints(1), ints(1)), lambda x, *_: x[:, 1:3]),
    OpCase(
        "",
        "Slice",
        (Spec("b s h"), ints(-3, 0), ints(-1, TO_LAST), ints(-2, 2), ints(1, 2)),
        lambda x, *_: x[:, -3:-1, ::2],
        label="from-end",
    ),
    OpCase("", "Slice", (Spec("b 9"), ints(1), ints(8), ints(1), ints(3)), lambda x, *_: x[:, 1:8:3], label="steps"),
    OpCase("", "Slice", (Spec("b s"), ints(0, 2), ints(100, TO_LAST)), lambda x, *_: x[:100, 2:], label="clamped"),
    OpCase("", "Slice", (Spec("b s"), ints(7), ints(2), ints(1), ints(1)), lambda x, *_: x[:, 7:2], label="empty"),
    OpCase(
        "",
        "Slice",
        (Spec("b s"), ints(-1, -1), ints(TO_FIRST, TO_FIRST), ints(0, 1), ints(-1, -1)),
        lambda x, *_: x.flip(0, 1),
        label="flip",
    ),
    OpCase(
        "",
        "Slice",
        (Spec("b 9"), ints(7), ints(-9), ints(1), ints(-3)),
        lambda x, *_: x[:, [7, 4, 1]],
        label="backwards",
    ),
    OpCase(
        "",
        "Slice",
        (Spec("b t s"), ints(0), SizesOf("t"), ints(1), ints(1)),
        lambda x, *_: x[:, : x.size(1)],
        label="symbolic",
    ),
    OpCase(
        MS,
        "SliceGrad",
        (Spec("b 3 h"), SizesOf("b 9 h"), ints(1), ints(8), ints(1), ints(3)),
        slice_grad,
        label="steps",
    ),
    OpCase(
        MS,
        "SliceGrad",
        (Spec("2 2 h"), SizesOf("6 5 h"), ints(1, -3), ints(3, -1), ints(0, 1), ints(1, 1)),
        slice_grad,
        label="two-axes",
    ),
    OpCase(
        MS,
        "SliceGrad",
        (Spec("b 3"), SizesOf("b 9"), ints(7), ints(-9), ints(1), ints(-3)),
        lambda dy, *_: dy.new_zeros(dy.size(0), 9).index_copy(1, torch.tensor([7, 4, 1]), dy),
        label="backwards",
    ),
    OpCase(OWN, "SliceScatter", (Spec("b 9 h"), Spec("b 3 h"), ints(1), ints(8), ints(1), ints(3)), slice_scatter),
    OpCase(
        OWN,
        "SliceScatter",
        (Spec("6 5 h"), Spec("2 2 h"), ints(1, -3), ints(3, -1), ints(0, 1), ints(1, 1)),
        slice_scatter,
        label="two-axes",
    ),
    OpCase(OWN, "Flip", (Spec("b s h"),), lambda x: x.flip(0, 2), {"along": [0, 2]}),
    # Tile, Pad, Roll
    OpCase("", "Tile", (Spec("b s h"), ints(2, 1, 3)), lambda x, r: x.repeat(2, 1, 3)),
    OpCase("", "Tile", (Spec("b s"), ints(0, 2)), lambda x, r: x.repeat(0, 2), label="none"),
    OpCase("", "Tile", (Spec("b s t"), SizesOf("t 1 1")), lambda x, r: x.repeat(r), label="symbolic"),
    OpCase(
        "", "Pad", (Spec("b s h"), ints(1, 0, 2, 0, 0, 3)), lambda x, *_: torch.nn.functional.pad(x, (2, 3, 0, 0, 1, 0))
    ),
    OpCase(
        "",
        "Pad",
        (Spec("b 6"), ints(-2, 1), Spec("", value=1.5), ints(1)),
        lambda x, *_: torch.nn.functional.pad(x, (-2, 1), value=1.5),
        label="cut",
    ),
    OpCase(
        "",
        "Pad",
        (Spec("b s"), SizesOf("0 s"), None, ints(-1)),
        lambda x, *_: torch.nn.functional.pad(x, (0, x.size(1))),
        label="symbolic",
    ),
    OpCase(
        "",
        "Pad",
        (Spec("b s 4"), ints(2, 3), None, ints(2)),
        lambda x, *_: torch.nn.functional.pad(x, (2, 3), "reflect"),
        {"mode": "reflect"},
        label="reflect",
    ),
    OpCase(
        "",
        "Pad",
        (Spec("b s t"), ints(1, 2, 0, 3), None, ints(1, 2)),
        lambda x, *_: torch.nn.functional.pad(x, (2, 3, 1, 0), "replicate"),
        {"mode": "edge"},
        label="edge",
    ),
    OpCase(
        OWN,
        "PadGrad",
        (Spec("b 9 s"), SizesOf("b 6 s-3"), ints(3, 1, 0, 2), ints(1, 2)),
        pad_grad("reflect", (1, 2, 3, 0)),
        {"mode": "reflect"},
        sizes=[{"b": 2, "s": 7}, {"b": 1, "s": 6}, {"b": 3, "s": 10}],
    ),
    OpCase(
        OWN,
        "PadGrad",
        (Spec("b s 8"), SizesOf("b s 3"), ints(4, 1), ints(2)),
        pad_grad("replicate", (4, 1)),
        {"mode": "edge"},
        label="edge",
    ),
    OpCase(OWN, "Roll", (Spec("b s h"),), lambda x: x.roll((2, -1), (1, 2)), {"shifts": [2, -1], "along": [1, -1]}),
    OpCase(OWN, "Roll", (Spec("b s"),), lambda x: x.roll(100, 0), {"shifts": [100], "along": [0]}, label="far"),
    # Matrices
    OpCase("", "Trilu", (Spec("b s t"),), torch.triu, specials=True),
    OpCase(
        "", "Trilu", (Spec("b s t"), Spec("", "int64", value=-1)), lambda x, k: x.tril(-1), {"upper": 0}, label="below"
    ),
    OpCase("", "Trilu", (Spec("5 4"), Spec("", "int64", value=2)), lambda x, k: x.triu(2), label="above"),
    OpCase(
        OWN,
        "Diagonal",
        (Spec("b s h"),),
        lambda x: x.diagonal(1, 0, 2),
        {"offset": 1, "row_axis": 0, "column_axis": 2},
        specials=True,
    ),
    OpCase(OWN, "Diagonal", (Spec("4 6 b"),), lambda x: x.diagonal(-2), {"offset": -2}, label="below"),
    OpCase(
        OWN, "DiagonalEmbed", (Spec("h 3"), SizesOf("4 h 4")), embed, {"offset": 1, "row_axis": 0, "column_axis": 2}
    ),
    OpCase(
        OWN,
        "Unfold",
        (Spec("b s h"),),
        lambda x: x.unfold(1, 3, 2),
        {"axis": 1, "size": 3, "step": 2},
        sizes=[{"b": 2, "s": 7, "h": 3}, {"b": 1, "s": 3, "h": 0}, {"b": 3, "s": 8, "h": 1}],
    ),
    OpCase(
        OWN,
        "UnfoldGrad",
        (Spec("b 4 h 3"), SizesOf("b 10 h")),
        unfold_grad,
        {"axis": 1, "size": 3, "step": 2},
        sizes=[{"b": 2, "h": 5}, {"b": 1, "h": 1}, {"b": 0, "h": 2}],
    ),
]
