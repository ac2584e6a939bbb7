"""Cases of the creation, gather, scatter and sorting ops, with PyTorch's functions as references."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F

from tests.op_case import OpCase, SizesOf, Spec

OWN, MS = "onnxtrain", "com.microsoft"
INT = torch.int64


def ints(*values: int) -> Spec:
    return Spec(str(len(values)), "int64", value=list(values))


def number(value: int) -> Spec:
    return Spec("", "int64", value=value)


def index_spec(dims: str, size: int, low: int = 0) -> Spec:
    """Return the spec of random indices from `low` to size - 1."""
    return Spec(dims, "int64", low=low, high=size)


def distinct_indices(dims: str, size: int) -> Spec:
    """Return the spec of random indices below `size` that are distinct_indices along the last axis."""

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        order = torch.argsort(torch.rand((*shape[:-1], size), generator=generator), -1)
        return order[..., : shape[-1]].to(dtype)

    return Spec(dims, "int64", make=make)


def on_zeros(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return the reference `write(zeros, *inputs)` of a backward op whose inputs are (shape, *inputs)."""
    return lambda shape, *inputs: write(torch.zeros(shape, dtype=inputs[-1].dtype), *inputs)


def plus_last_input(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reference that adds the last input to the `reference` of the others."""
    return lambda *inputs: reference(*inputs[:-1]) + inputs[-1]


def gather(x: Any, rows: Any) -> Any:
    return x[:, rows]


def embedding_grad(**options: Any) -> Callable[..., Any]:
    def reference(shape: Any, rows: Any, dy: Any) -> Any:
        weight = torch.zeros(shape, dtype=dy.dtype, requires_grad=True)
        return torch.autograd.grad(F.embedding(rows, weight, **options), weight, dy)[0]

    return reference


def gather_nd(x: Any, indices: Any) -> Any:
    return x[indices[..., 0], indices[..., 1]]


def gather_nd_batched(x: Any, indices: Any) -> Any:
    return torch.stack([x[i][indices[i, ..., 0]] for i in range(x.size(0))]) if x.size(0) else x.new_zeros(0, 2, 4)


def index_put(accumulate: bool) -> Callable[..., Any]:
    return lambda x, values, i, j: torch.index_put(x, (i, j), values, accumulate)


def full(value: Any, dtype: ir.DataType) -> ir.TensorProtocol:
    return ir.tensor(np.array([value], dtype=dtype.numpy()))


# Negative indices, which ONNX allows, and other integer types


def wrapped(indices: Any, size: int) -> Any:
    return indices.long() % size


INT32 = Spec("b s h", torch.int32, low=-7, high=7)
NEGATIVE = [
    OpCase("", "Gather", (Spec("b 7 h"), index_spec("s", 7, -7)), lambda x, i: x[:, i], {"axis": 1}, label="negative"),
    OpCase("", "Gather", (Spec("7 h"), index_spec("b s", 7, -7)), lambda x, i: x[i], label="negative-table"),
    OpCase(
        "", "Gather", (Spec("b 7 h"), ints(-1, 0, -7)), lambda x, i: x[:, i], {"axis": 1}, label="negative-constant"
    ),
    OpCase(
        "",
        "GatherElements",
        (Spec("b 7 h"), INT32),
        lambda x, i: x.gather(1, wrapped(i, 7)),
        {"axis": 1},
        label="negative",
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 1}],
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("b 7 h"), INT32, Spec("b s h")),
        lambda x, i, u: x.scatter_add(1, wrapped(i, 7), u),
        {"axis": 1, "reduction": "add"},
        label="negative",
        sizes=[{"b": 3, "s": 5, "h": 2}, {"b": 1, "s": 1, "h": 1}],
    ),
    OpCase(
        "",
        "OneHot",
        (Spec("b s", "int64", low=-7, high=9), number(5), Spec("2", torch.float32, value=[-1.5, 2.5])),
        lambda i, *_: torch.where((torch.where(i < 0, i + 5, i)[:, None] == torch.arange(5)[:, None]), 2.5, -1.5),
        {"axis": 1},
        label="values",
    ),
]


# Reductions, with repeated coordinates, and with zeros among the small_integers


def small_integers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def scatter_nd(reduce: str) -> Any:
    def reference(x: Any, indices: Any, updates: Any) -> Any:
        rows = (indices[..., 0] % 4) * 3 + indices[..., 1] % 3
        rows = rows.reshape(-1, 1).expand(-1, x.shape[2])
        flat = x.reshape(12, x.shape[2])
        return flat.scatter_reduce(0, rows, updates.reshape(rows.shape), reduce).reshape(x.shape)

    return reference


COORDINATES = Spec("s 2", "int64", make=lambda s, d, g: torch.randint(-3, 3, s, generator=g))
REDUCTIONS = [
    *(
        OpCase(
            "",
            "ScatterND",
            (Spec("4 3 h", make=small_integers), COORDINATES, Spec("s h", make=small_integers)),
            scatter_nd(reduce),
            {"reduction": name},
            label=name,
        )
        for name, reduce in (("mul", "prod"), ("max", "amax"), ("min", "amin"))
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("b 3 h", make=small_integers), Spec("b s h", "int64", low=0, high=3), Spec("b s h", make=small_integers)),
        lambda x, i, u: x.scatter_reduce(1, i, u, "prod"),
        {"axis": 1, "reduction": "mul"},
        label="mul",
    ),
]

CASES = [
    # Creation
    OpCase("", "ConstantOfShape", (SizesOf("2 3"),), torch.zeros),
    OpCase(
        "",
        "ConstantOfShape",
        (SizesOf(""),),
        lambda s: torch.full(s, 7),
        {"value": full(7, ir.DataType.INT64)},
        label="scalar",
    ),
    OpCase(
        "",
        "ConstantOfShape",
        (SizesOf("2 0"),),
        lambda s: torch.ones(s, dtype=torch.bool),
        {"value": full(True, ir.DataType.BOOL)},
        label="bool",
    ),
    OpCase("", "Range", (number(0), number(5), number(1)), lambda *bounds: torch.arange(5)),
    OpCase("", "Range", (number(9), number(-2), number(-3)), lambda *bounds: torch.arange(9, -2, -3), label="down"),
    OpCase("", "Range", (number(4), number(2), number(1)), lambda *bounds: torch.arange(0), label="empty"),
    # Rows
    OpCase("", "Gather", (Spec("b 7 h"), index_spec("s", 6)), gather, {"axis": 1}),
    OpCase("", "Gather", (Spec("7 h"), index_spec("b s", 6)), lambda x, i: x[i], label="table"),
    OpCase("", "Gather", (Spec("b 7"), index_spec("s t", 6)), gather, {"axis": -1}, label="last"),
    OpCase("", "Gather", (Spec("b 7 h"), number(-2)), lambda x, i: x[:, -2], {"axis": 1}, label="select"),
    OpCase(
        "",
        "Gather",
        (Spec("b 7 h"), index_spec("", 6)),
        lambda x, i: x.index_select(1, i).squeeze(1),
        {"axis": 1},
        label="computed",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("7 h"), index_spec("b s", 6), Spec("b s h")),
        on_zeros(lambda z, i, dy: z.index_put((i,), dy, True)),
        label="table",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("b 7 h"), index_spec("s", 6), Spec("b s h")),
        on_zeros(lambda z, i, dy: z.index_add(1, i, dy)),
        {"axis": 1},
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("b 7"), number(3), Spec("b")),
        on_zeros(lambda z, i, dy: z.select_scatter(dy, 1, 3)),
        {"axis": 1},
        label="select",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("b 7"), index_spec("s t", 6), Spec("b s t")),
        on_zeros(lambda z, i, dy: z.index_add(1, i.reshape(-1), dy.flatten(1))),
        {"axis": -1},
        label="last",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("7 h"), index_spec("b s", 6), Spec("b s h"), Spec("7 h")),
        plus_last_input(on_zeros(lambda z, i, dy: z.index_put((i,), dy, True))),
        label="table-sum",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("b 7 h"), index_spec("s", 6), Spec("b s h"), Spec("b 7 h")),
        plus_last_input(on_zeros(lambda z, i, dy: z.index_add(1, i, dy))),
        {"axis": 1},
        label="sum",
    ),
    OpCase(
        MS,
        "GatherGrad",
        (SizesOf("b 7"), number(3), Spec("b"), Spec("b 7")),
        plus_last_input(on_zeros(lambda z, i, dy: z.select_scatter(dy, 1, 3))),
        {"axis": 1},
        label="select-sum",
    ),
    OpCase(
        OWN,
        "Embedding",
        (Spec("7 h"), index_spec("b s", 6)),
        lambda w, i: F.embedding(i, w, padding_idx=2),
        {"padding_idx": 2},
    ),
    OpCase(
        OWN,
        "Embedding",
        (Spec("7 h"), index_spec("b s", 3)),
        lambda w, i: F.embedding(i, w, scale_grad_by_freq=True),
        {"scale_grad_by_freq": 1},
        label="by-frequency",
    ),
    OpCase(
        OWN,
        "EmbeddingGrad",
        (SizesOf("4 h"), index_spec("b s", 3), Spec("b s h")),
        embedding_grad(padding_idx=1, scale_grad_by_freq=True),
        {"padding_idx": 1, "scale_grad_by_freq": 1},
    ),
    OpCase(
        OWN,
        "EmbeddingGrad",
        (SizesOf("4 h"), index_spec("b s", 3), Spec("b s h"), Spec("4 h")),
        plus_last_input(embedding_grad(padding_idx=1, scale_grad_by_freq=True)),
        {"padding_idx": 1, "scale_grad_by_freq": 1},
        label="sum",
    ),
    *(
        OpCase(
            OWN,
            "EmbeddingGrad",
            (SizesOf("4 h"), index_spec("b s", 3), Spec("b s h"), *added),
            plus_last_input(embedding_grad(padding_idx=1)) if added else embedding_grad(padding_idx=1),
            {"padding_idx": 1},
            label=f"padding{'-sum' * len(added)}",
        )
        for added in ((), (Spec("4 h"),))
    ),
    # Elements
    OpCase("", "GatherElements", (Spec("b 7 h"), index_spec("b s h", 6)), lambda x, i: x.gather(1, i), {"axis": 1}),
    OpCase(
        "",
        "GatherElements",
        (Spec("b 7 4"), index_spec("b s 3", 6)),
        lambda x, i: x.gather(1, i),
        {"axis": 1},
        label="fewer",
    ),
    OpCase(
        MS,
        "GatherElementsGrad",
        (Spec("b s h"), SizesOf("b 7 h"), index_spec("b s h", 6)),
        lambda dy, shape, i: torch.zeros(shape, dtype=dy.dtype).scatter_add(1, i, dy),
        {"axis": 1},
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("b 7"), distinct_indices("b 3", 7), Spec("b 3")),
        lambda x, i, u: x.scatter(1, i, u),
        {"axis": 1},
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("b 7"), index_spec("b s", 6), Spec("b s")),
        lambda x, i, u: x.scatter_add(1, i, u),
        {"axis": -1, "reduction": "add"},
        label="add",
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("b 7"), index_spec("b s", 6), Spec("b s")),
        lambda x, i, u: x.scatter_reduce(1, i, u, "amax"),
        {"axis": 1, "reduction": "max"},
        label="max",
    ),
    OpCase(
        "",
        "ScatterElements",
        (Spec("7 b"), index_spec("s b", 6), Spec("s b")),
        lambda x, i, u: x.scatter_reduce(0, i, u, "amin"),
        {"reduction": "min"},
        label="min",
    ),
    # Coordinates
    OpCase("", "GatherND", (Spec("6 5 h"), index_spec("b s 2", 5, low=-5)), gather_nd),
    OpCase(
        "", "GatherND", (Spec("b 6 4"), index_spec("b 2 1", 6)), gather_nd_batched, {"batch_dims": 1}, label="batch"
    ),
    OpCase(
        MS,
        "GatherNDGrad",
        (SizesOf("6 5 h"), index_spec("b s 2", 5, low=-5), Spec("b s h")),
        on_zeros(lambda z, at, dy: z.index_put((at[..., 0], at[..., 1]), dy, True)),
    ),
    OpCase(
        MS,
        "GatherNDGrad",
        (SizesOf("b 6"), index_spec("b s 1", 6), Spec("b s")),
        on_zeros(lambda z, at, dy: z.scatter_add(1, at[..., 0], dy)),
        {"batch_dims": 1},
        label="batch",
    ),
    OpCase(
        "",
        "ScatterND",
        (Spec("6 h"), Spec("3 1", INT, value=[[4], [-6], [2]]), Spec("3 h")),
        lambda x, at, u: x.index_put((at[:, 0],), u),
    ),
    OpCase(
        "",
        "ScatterND",
        (Spec("6 5 h"), index_spec("b s 2", 5, low=-5), Spec("b s h")),
        lambda x, at, u: x.index_put((at[..., 0], at[..., 1]), u, True),
        {"reduction": "add"},
        label="add",
    ),
    # Subscripts
    OpCase(
        OWN,
        "Index",
        (Spec("6 5 h"), index_spec("b 1", 6, low=-6), index_spec("s", 5)),
        lambda x, i, j: x[i, j],
        {"axes": [0, 1]},
    ),
    OpCase(
        OWN, "Index", (Spec("b 6 s"), index_spec("s t", 6, low=-6)), lambda x, i: x[:, i], {"axes": [1]}, label="one"
    ),
    OpCase(
        OWN,
        "Index",
        (Spec("5 b 6"), index_spec("s", 5), index_spec("s", 6)),
        lambda x, i, j: x[i, :, j],
        {"axes": [0, 2]},
        label="apart",
    ),
    OpCase(
        OWN,
        "Index",
        (Spec("b 5 6 h"), index_spec("s t", 5), index_spec("", 6)),
        lambda x, i, j: x[:, i, j.expand(i.shape)],
        {"axes": [1, 2]},
        label="scalar",
    ),
    OpCase(
        OWN,
        "IndexGrad",
        (SizesOf("6 5 h"), Spec("b s h"), index_spec("b 1", 6, low=-6), index_spec("s", 5)),
        lambda shape, dy, i, j: torch.zeros(shape, dtype=dy.dtype).index_put((i, j), dy, True),
        {"axes": [0, 1]},
    ),
    OpCase(
        OWN,
        "IndexGrad",
        (SizesOf("b 6 h"), Spec("b s t h"), index_spec("s t", 6)),
        lambda shape, dy, i: torch.zeros(shape, dtype=dy.dtype).index_add(1, i.reshape(-1), dy.flatten(1, 2)),
        {"axes": [1]},
        label="middle",
    ),
    OpCase(
        OWN,
        "IndexPut",
        (Spec("6 5 h"), Spec("2 h"), Spec("2", INT, value=[3, -6]), Spec("2", INT, value=[0, 4])),
        index_put(False),
        {"axes": [0, 1]},
    ),
    OpCase(
        OWN,
        "IndexPut",
        (Spec("6 5 h"), Spec("s h"), index_spec("b 1", 6, low=-6), index_spec("s", 5)),
        index_put(True),
        {"axes": [0, 1], "accumulate": 1},
        label="add",
    ),
    OpCase(
        OWN,
        "IndexPut",
        (Spec("5 b 6"), Spec("s b"), index_spec("s", 5), index_spec("s", 6)),
        lambda x, v, i, j: torch.ops.aten.index_put(x, [i, None, j], v, True),
        {"axes": [0, 2], "accumulate": 1},
        label="apart",
    ),
    OpCase(
        OWN,
        "IndexPut",
        (Spec("b 6"), Spec(""), distinct_indices("4", 6)),
        lambda x, v, i: torch.ops.aten.index_put(x, [None, i], v),
        {"axes": [1]},
        label="one-number",
    ),
    OpCase("", "NonZero", (Spec("b s", low=0, high=2, dtype="int64"),), lambda x: x.nonzero().t()),
    OpCase(OWN, "LabelledRows", (Spec("s", low=0, high=2, dtype="bool"),), lambda x: x.nonzero().flatten()),
    OpCase(
        OWN,
        "IndexAdd",
        (Spec("b 6 h"), index_spec("s", 5), Spec("b s h")),
        lambda x, i, u: x.index_add(1, i, u),
        {"axis": 1},
    ),
    OpCase(
        OWN,
        "IndexCopy",
        (Spec("b 6 h"), distinct_indices("4", 6), Spec("b 4 h")),
        lambda x, i, u: x.index_copy(1, i, u),
        {"axis": 1},
    ),
    OpCase(
        OWN,
        "MaskedScatter",
        (Spec("b s h"), Spec("b s h", "bool"), Spec("b*s h")),
        lambda x, m, u: x.masked_scatter(m, u),
    ),
    OpCase(
        OWN,
        "MaskedScatterGrad",
        (Spec("b s"), Spec("b s", "bool"), SizesOf("s b")),
        torch.ops.aten.masked_scatter_backward,
    ),
    # Order
    OpCase("", "TopK", (Spec("b 7 h"), ints(3)), lambda x, k: x.topk(3, 1), {"axis": 1}),
    OpCase("", "TopK", (Spec("b 7"), ints(2)), lambda x, k: x.topk(2, largest=False), {"largest": 0}, label="smallest"),
    OpCase(OWN, "Sort", (Spec("b s h"),), lambda x: x.sort(dim=1, stable=True), {"axis": 1}, specials=True),
    OpCase(
        OWN,
        "Sort",
        (Spec("b s"),),
        lambda x: x.sort(descending=True, stable=True),
        {"descending": 1},
        specials=True,
        label="down",
    ),
    OpCase(OWN, "Sort", (Spec("b s", "int64", low=-3, high=3),), lambda x: x.sort(stable=True), label="ints"),
    *(
        OpCase(
            OWN,
            "KthValue",
            (Spec("b 5 h"), ints(k)),
            lambda x, _, k=k: x.kthvalue(k, 1, keepdim=True),
            {"axis": 1},
            label=str(k),
        )
        for k in (1, 3, 5)
    ),
    OpCase(OWN, "Cross", (Spec("b 3 h"), Spec("b 3 h")), lambda a, b: torch.linalg.cross(a, b, dim=1), {"axis": 1}),
    OpCase("", "OneHot", (index_spec("b s", 5), number(5), ints(0, 1)), lambda i, *_: F.one_hot(i, 5)),
    *NEGATIVE,
    *REDUCTIONS,
]
