"""Captures of PyTorch's creation, gather, scatter, masking and sorting functions."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from onnxtrain.errors import UnsupportedOperatorError
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import FROM_TORCH, builder
from onnxtrain.ops.index.accumulate import add_in_order, add_to_zeros
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import Spec
from tests.ops.captures import X, check_capture, check_captures, in_groups
from tests.thinned import slow_but_every, slow_except

Function = Callable[..., Any]


def index_spec(dims: str, size: int, low: int = 0) -> Spec:
    """Return the spec of random indices from `low` to size - 1."""
    return Spec(dims, "int64", low=low, high=size)


def fill_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[mask] = 0.5
    return z


def write_masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[mask] = x[mask] * 2
    return z


def write_rows(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    z = x.clone()
    z[:, torch.tensor([2, 0])] = values
    z[:, [1]] = 7
    return z


ONE_INPUT: dict[str, Function] = {
    "arange": lambda x: (
        torch.arange(x.size(1)),
        torch.arange(2, x.size(1)),
        torch.arange(0, x.size(1) * 2, 2),
        torch.arange(5.0),
        torch.arange(x.size(0), dtype=torch.float32),
        torch.arange(0, 1, 0.1),
        torch.arange(10, 0, -3),
        torch.arange(1, 3, 0.5, dtype=torch.float64),
    ),
    "fill": lambda x: (
        torch.zeros(x.size(0), 3),
        torch.ones_like(x),
        torch.full((2, x.size(1)), 2.5),
        torch.full((2, 3), 7),
        torch.full((2,), x.size(0)),
        x.new_zeros(3),
        torch.zeros_like(x, dtype=torch.int64),
        torch.full_like(x, float("-inf")),
        x.new_full((2,), 7),
        x.new_ones(x.size(0)),
        torch.ones(3, dtype=torch.bool),
    ),
    "matrix": lambda x: (
        torch.eye(3),
        torch.eye(x.size(0), x.size(1)),
        torch.linspace(0, 1, 5),
        torch.triu_indices(4, 4, 1),
        torch.tril_indices(3, 4),
    ),
    "scalar": lambda x: (torch.scalar_tensor(3.0), torch.tensor(5), torch.tensor(x.size(0))),
    "in-place": lambda x: (x.clone().fill_(2.0) + x, x.clone().zero_() + x),
    "list": lambda x: (x[..., [0, 2, 1]], x[:, [0, 1]][:, :, [3, -1]]),
    "computed-indices": lambda x: (
        x[torch.arange(x.size(0)), torch.arange(x.size(0))],
        x[:, torch.arange(x.size(1)) - 1],
    ),
    "topk": lambda x: (*x.topk(2), *x.topk(1, 0, largest=False)),
    "sort": lambda x: (*x.sort(), *x.sort(0, descending=True), x.argsort(1), *x.sort(dim=1, stable=True), x.msort()),
    "sort-scalar": lambda x: (*x.mean().sort(), *x.sum().topk(1)),
}


OF_ONE_TENSOR = {name: (function, X) for name, function in ONE_INPUT.items()}


@pytest.mark.parametrize("names", in_groups(OF_ONE_TENSOR))
def test_function_of_one_tensor_matches_eager(names: list[str]) -> None:
    check_captures(OF_ONE_TENSOR, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_INPUT)
def test_function_of_one_tensor_alone_matches_eager(name: str) -> None:
    check_capture(ONE_INPUT[name])


def test_topk_in_bfloat16() -> None:
    """ONNX's TopK does not support bfloat16."""
    check_capture(ONE_INPUT["topk"], dtype=torch.bfloat16)


def test_scatter_of_symbolic_updates_at_a_constant_index() -> None:
    index = torch.tensor([0])
    check_capture(lambda x: x.scatter_add(0, index, x * 2) + x.scatter(0, index, x * x), Spec("b"), sizes=({"b": 1},))


WITH_INDICES: dict[str, tuple[Function, tuple[Spec, ...]]] = {
    "embedding": (lambda w, i: F.embedding(i, w), (Spec("7 h"), index_spec("b s", 6))),
    "embedding-padding": (lambda w, i: F.embedding(i, w, padding_idx=1), (Spec("7 6"), index_spec("b s", 3))),
    "embedding-frequency": (
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        (Spec("7 6"), index_spec("b s", 3)),
    ),
    "embedding-int32": (lambda w, i: F.embedding(i, w), (Spec("7 6"), Spec("b s", torch.int32, low=0, high=6))),
    "index-select": (lambda x, i: x.index_select(-1, i), (Spec("b s 6"), index_spec("s", 5))),
    "subscript": (lambda x, i: (x[..., i], x[..., i[:1]]), (Spec("b s 6"), index_spec("s h", 6, low=-6))),
    "subscript-apart": (lambda x, i: x[i[0], :, i], (Spec("6 b 6"), index_spec("s h", 6))),
    "subscript-number": (lambda x, i: x[:, 0, i], (Spec("b s 6"), index_spec("s", 6))),
    "gather": (lambda x, i: x.gather(-1, i), (Spec("b s 6"), index_spec("b s h", 5))),
    "gather-labels": (lambda x, i: x.gather(-1, i[..., None])[..., 0], (Spec("b s 6"), index_spec("b s", 5))),
    "gather-fewer": (lambda x, i: x.gather(2, i), (Spec("b+1 s 6"), index_spec("b s 3", 5))),
    "scatter": (
        lambda x, i: (x.scatter(2, i[..., :1], 2.5), x.scatter(2, i[..., :1], x.detach()), x.scatter_add(2, i, x)),
        (Spec("b s 6"), index_spec("b s 6", 5)),
    ),
    "scatter-reduce": (
        lambda x, i: (x.scatter_reduce(2, i, x * 2, "amax"), x.scatter_reduce(2, i, x, "sum")),
        (Spec("b s 6"), index_spec("b s 6", 5)),
    ),
    "index-add": (
        lambda x, i: (x.index_add(2, i, x), x.index_add(-1, i, x, alpha=2.0)),
        (Spec("b s 6"), index_spec("6", 5)),
    ),
    "index-put-add": (
        lambda x, i: x.index_put((torch.arange(x.size(0)), i), x[:, 0] * 2, accumulate=True),
        (Spec("b 6 h"), index_spec("b", 5, low=-6)),
    ),
    **{
        f"scatter-{reduce}{'' if include_self else '-without-self'}": (
            lambda x, i, reduce=reduce, include_self=include_self: x.scatter_reduce(
                2, i, x * 2, reduce, include_self=include_self
            ),
            (Spec("b s 6"), index_spec("b s 6", 5)),
        )
        for reduce in ("sum", "prod", "mean", "amax", "amin")
        for include_self in (True, False)
    },
    **{
        f"index-{reduce}{'' if include_self else '-without-self'}": (
            lambda x, i, reduce=reduce, include_self=include_self: x.index_reduce(
                1, i, x[:, :4] * 2, reduce, include_self=include_self
            ),
            (Spec("b 6 h"), index_spec("4", 5)),
        )
        for reduce in ("prod", "mean", "amax", "amin")
        for include_self in (True, False)
    },
    "scatter-multiply": (
        lambda x, i: x.detach().scatter(2, i, x.detach(), reduce="multiply") + x,
        (Spec("b s 6"), index_spec("b s 6", 5)),
    ),
    "take": (lambda x, i: x.take(i), (Spec("b s 6"), index_spec("h 2", 6, low=-6))),
    "index-fill": (lambda x, i: x.index_fill(2, i, 3.0), (Spec("b s 6"), index_spec("3", 5))),
    "index-fill-value": (
        lambda x, i: x.index_fill(2, torch.cat([i, i]), x.sum()),
        (Spec("b s 6"), index_spec("3", 5)),
    ),
    "one-hot": (lambda i: F.one_hot(i, 7), (index_spec("b s", 6),)),
}


# The gradient depends on the reduction; whether the result has the element itself matters to all of them alike.
OF_OTHERS = ("-prod-without-self", "-mean", "-amin-without-self", "-amax")


@pytest.mark.parametrize("name", slow_except(WITH_INDICES, *(n for n in WITH_INDICES if not n.endswith(OF_OTHERS))))
def test_function_of_indices_matches_eager(name: str) -> None:
    function, specs = WITH_INDICES[name]
    check_capture(function, *specs)


MASKED: dict[str, Function] = {
    "rows": lambda x, m: x[m] * 2,
    "middle": lambda x, m: x.permute(2, 0, 1)[:, m],
    "select": lambda x, m: x[..., 0].masked_select(m),
    "nonzero": lambda x, m: (m.nonzero(), *m.nonzero(as_tuple=True), x * 2),
    "fill": fill_masked,
    "write": write_masked,
    "scatter": lambda x, m: x.masked_scatter(m[..., None].expand_as(x), x.flatten() * 2),
}


@pytest.mark.parametrize("name", MASKED)
def test_function_of_a_mask_matches_eager(name: str) -> None:
    check_capture(MASKED[name], Spec("b s h"), Spec("b s", "bool"))


# The numbers of elements that the masks of successive calls select: sizes of 0, 1 and more run on the same capture.
COUNTS = {"5, 0, 1, 3, 0, 1": (5, 0, 1, 3, 0, 1), "0 first": (0, 7, 1, 1, 0, 2), "1 first": (1, 7, 0, 0, 1, 2)}
SIZES_OF_COUNTS = (*[{"b": 3, "s": 4, "h": 6}] * 3, *[{"b": 1, "s": 7, "h": 6}] * 3)


@pytest.mark.parametrize("counts", slow_but_every(3, COUNTS))
@pytest.mark.parametrize("name", slow_but_every(2, MASKED))
def test_one_capture_serves_masks_of_any_count(name: str, counts: str) -> None:
    remaining = iter(COUNTS[counts])

    def selects(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        order = torch.randperm(shape[0] * shape[1], generator=generator)
        return (order < next(remaining)).reshape(shape)

    check_capture(MASKED[name], Spec("b s h"), Spec("b s", "bool", make=selects), sizes=SIZES_OF_COUNTS)


def test_take_along_dim_matches_eager() -> None:
    """PyTorch specializes on the sizes that are 1: only one set of sizes runs."""
    specs = (Spec("b s 6"), index_spec("b s 4", 5))
    check_capture(lambda x, i: torch.take_along_dim(x, i[:1, :1], 2), *specs, sizes=[{"b": 3, "s": 4}])


def test_assignment_to_rows_matches_eager() -> None:
    check_capture(write_rows, Spec("b s h"), Spec("b 2 h"))


def test_trace_diagonal_scatter_and_cross_match_eager() -> None:
    check_capture(lambda x: x[0].trace() * x, Spec("b s h"))
    check_capture(lambda x, d: x.diagonal_scatter(d, 0, 1, 2), Spec("b 4 4"), Spec("b 4"))
    check_capture(lambda x, d: x.diagonal_scatter(d, -1, 2, 0), Spec("5 b 3"), Spec("b 2"))
    check_capture(lambda x, y: torch.linalg.cross(x, y, dim=1), Spec("b 3 h"), Spec("1 3 h"))


def test_sparse_embedding_raises() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23})
    weight, rows = ir.Value(name="weight"), ir.Value(name="rows")
    set_type(weight, TensorType(ir.DataType.FLOAT, (5, 4)))
    set_type(rows, TensorType(ir.DataType.INT64, ("b",)))
    graph.inputs.extend([weight, rows])
    with pytest.raises(UnsupportedOperatorError, match="sparse"):
        FROM_TORCH["aten.embedding.default"](builder(graph), weight, rows, -1, False, True)


@pytest.mark.parametrize(
    ("function", "index"),
    [
        (lambda x, i: F.embedding(i, x), 9),
        (lambda x, i: x[i], 9),
        (lambda x, i: x[:, i], -7),
        (lambda x, i: x.gather(0, i[:, None]), 9),
        (lambda x, i: x.scatter_add(0, i[:, None], x[0, :1][None]), 9),
        (lambda x, i: x.index_put((i,), x[:1], accumulate=True), 9),
        (lambda x, i: x.index_add(0, i, x[:1]), 9),
    ],
)
def test_index_out_of_range_raises(function: Function, index: int) -> None:
    ours = check_capture(function, Spec("5 6"), Spec("1", "int64", low=0, high=2), sizes=[{}])
    with pytest.raises((IndexError, RuntimeError)):
        ours(torch.randn(5, 6), torch.tensor([index]))


@pytest.mark.parametrize("axes", [(0, 1), (1, 2), (0, 2), (1,), (2,)])
def test_deterministic_accumulation_matches_index_put(axes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    index = [torch.randint(-x.size(a), x.size(a), (6, 1 + k), generator=generator) for k, a in enumerate(axes)]
    indices: list[Any] = [None] * 3
    for axis, tensor in zip(axes, index, strict=True):
        indices[axis] = tensor
    updates = torch.randn(torch.ops.aten.index(x, indices).shape, generator=generator, dtype=torch.float64)
    expected = torch.ops.aten.index_put(torch.zeros_like(x), indices, updates, True)
    assert_no_worse_than_eager("sums", add_to_zeros((3, 4, 5), axes, index, updates), expected, expected)
    assert_no_worse_than_eager("x + sums", add_in_order(x, axes, index, updates), x + expected, x + expected)
