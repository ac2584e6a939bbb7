"""Cases of the reductions, with PyTorch's functions as references.

Axes are not negative, because onnxruntime's result for an empty tensor and a negative axis is wrong.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.functional import vjp

from onnxtrain.graph.values import OWN
from tests.op_case import OpCase, SizesOf, Spec


def ties(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return elements among five values, so that maxima and minima are tied."""
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def rows_of_minus_inf(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return elements with -inf in all of every second row, and as the first element of the others."""
    x = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    if x.numel():
        x[..., :1] = float("-inf")
        x[::2] = float("-inf")
    return x


def over(
    name: str,
    reference: Callable[..., Any],
    *,
    domain: str = "",
    spec: Spec | None = None,
    attributes: dict[str, Any] | None = None,
    axes: Sequence[tuple[int, ...]] = ((2,), (0,), (0, 1, 2), (0, 2)),
    label: str = "",
    **fields: Any,
) -> list[OpCase]:
    """Return cases over the last axis, the first, all and some, with and without keepdims."""
    return [
        OpCase(
            domain,
            name,
            (spec or Spec("b s h"), Spec("1", "int64", value=list(over_axes))),
            lambda x, _, dims=over_axes, keep=bool(keepdims): reference(x, dims, keep),
            {"keepdims": keepdims, **(attributes or {})},
            **{"specials": True, **fields},
            label=f"{label}{over_axes}{'' if keepdims else 'dropped'}",
        )
        for over_axes, keepdims in zip(axes, (1, 0, 0, 1), strict=False)
    ]


def prod(x: torch.Tensor, dims: tuple[int, ...], keep: bool) -> torch.Tensor:
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.prod(dim, keepdim=keep)
    return x


SUMS = [
    *over("ReduceSum", lambda x, d, k: x.sum(d, k)),
    *over("ReduceSum", lambda x, d, k: x.sum(d, k), spec=Spec("b s h", "int64"), label="int64"),
    OpCase("", "ReduceSum", (Spec("b s"),), lambda x: x.sum(), {"keepdims": 0}, label="no-axes"),
    OpCase("", "ReduceSum", (Spec(""), Spec("0", "int64", value=[])), lambda x, _: x.sum(), label="0-d"),
    *over("ReduceMean", lambda x, d, k: x.mean(d, k)),
    OpCase("", "ReduceMean", (Spec("2 3"),), lambda x: x.mean(), {"keepdims": 0}, label="fixed"),
    OpCase("", "ReduceMean", (Spec(""), Spec("0", "int64", value=[])), lambda x, _: x.mean(), label="0-d"),
    *over("ReduceProd", prod, specials=False),
    *over("ReduceProd", prod, spec=Spec("b s h", make=ties), specials=False, label="zeros"),
    OpCase("", "CumSum", (Spec("b s h"), Spec("", "int64", value=1)), lambda x, _: x.cumsum(1), specials=True),
    OpCase(
        "",
        "CumSum",
        (Spec("b s"), Spec("", "int64", value=-1)),
        lambda x, _: x.flip(-1).cumsum(-1).flip(-1),
        {"reverse": 1},
        label="reverse",
    ),
    OpCase("", "CumSum", (Spec("b s", "int64"), Spec("", "int64", value=0)), lambda x, _: x.cumsum(0), label="int64"),
    OpCase(OWN, "SumTo", (Spec("b s h"), SizesOf("s h")), lambda x, shape: x.sum_to_size(shape), label="leading"),
    OpCase(OWN, "SumTo", (Spec("b s h"), SizesOf("b 1 h")), lambda x, shape: x.sum_to_size(shape), label="one"),
    OpCase(OWN, "SumTo", (Spec("b s"), SizesOf("b s")), lambda x, shape: x.sum_to_size(shape), label="none"),
    OpCase(  # its gradient sums to symbolic sizes that may or may not be equal
        "",
        "Add",
        (Spec("b s h"), Spec("t h")),
        operator.add,
        sizes=[
            {"b": 2, "s": 3, "t": 3, "h": 4},
            {"b": 2, "s": 3, "t": 1, "h": 4},
            {"b": 2, "s": 1, "t": 1, "h": 4},
            {"b": 2, "s": 0, "t": 1, "h": 4},
            {"b": 2, "s": 0, "t": 0, "h": 4},
            {"b": 0, "s": 3, "t": 3, "h": 1},
        ],
        label="SumTo",
    ),
]


def along_axis(function: Callable[..., torch.Tensor], axis: int, keep: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x, axis, bool(keep))


EXTREMES = [
    case
    for name, amax, argmax, dim in (
        ("Max", torch.amax, torch.argmax, torch.max),
        ("Min", torch.amin, torch.argmin, torch.min),
    )
    for case in (
        *over(f"Reduce{name}", amax, domain=OWN),
        *over(f"Reduce{name}", amax, domain=OWN, spec=Spec("b s h", make=ties), label="ties"),
        *over(f"Reduce{name}", amax, specials=False),
        *over(f"Reduce{name}", amax, spec=Spec("b s h", "int64"), label="int64"),
        *(
            OpCase(
                domain,
                f"Arg{name}",
                (Spec("b s h", make=make),),
                along_axis(argmax, axis, keep),
                {"axis": axis, "keepdims": keep},
                specials=domain == OWN and make is None,
                label=f"{axis}{keep}{'' if make is None else 'ties'}",
            )
            for domain in ("", OWN)
            for axis, keep in ((2, 1), (0, 0))
            for make in (None, ties)
        ),
        *(
            OpCase(
                OWN,
                f"{name}Dim",
                (Spec("b s h", make=make),),
                along_axis(dim, axis, keep),
                {"axis": axis, "keepdims": keep},
                specials=make is None,
                label=f"{axis}{keep}{'' if make is None else 'ties'}",
            )
            for axis, keep in ((2, 1), (1, 0))
            for make in (None, ties)
        ),
        OpCase(OWN, f"{name}Dim", (Spec("b s", "int64"),), along_axis(dim, 1, 1), {"axis": 1}, label="int64"),
    )
]

LOGICAL = [
    *over("ReduceAny", torch.any, domain=OWN, spec=Spec("b s h", "bool")),
    *over("ReduceAll", torch.all, domain=OWN, spec=Spec("b s h", "bool")),
]

NORMS = [
    *over("ReduceL1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d, k)),
    *over(
        "ReduceL1", lambda x, d, k: torch.linalg.vector_norm(x, 1, d, k), spec=Spec("b s h", make=ties), label="zeros"
    ),
    *over("ReduceL2", lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k)),
    *over(
        "ReduceL2",
        lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k),
        spec=Spec("b s h", make=lambda shape, dtype, _: torch.zeros(shape, dtype=dtype)),
        label="zeros",
    ),
    *over("ReduceLogSumExp", torch.logsumexp),
    *over("ReduceLogSumExp", torch.logsumexp, spec=Spec("b s h", low=80.0, high=90.0), label="large"),
    *over("ReduceLogSumExp", torch.logsumexp, spec=Spec("b s h", make=rows_of_minus_inf), label="masked"),
]

VARIANCE = [
    case
    for name, function in (
        ("ReduceVar", torch.var),
        ("ReduceStd", torch.std),
        ("ReduceVarMean", torch.var_mean),
        ("ReduceStdMean", torch.std_mean),
    )
    for correction in (0.0, 1.0)
    for case in over(
        name,
        lambda x, d, k, f=function, c=correction: f(x, d, correction=c, keepdim=k),
        domain=OWN,
        attributes={"correction": correction},
        specials=not name.endswith("Mean"),  # the mean of torch.var_mean is NaN if there is an infinity
        sizes=[{"b": 3, "s": 5, "h": 4}, {"b": 2, "s": 3, "h": 7}, {"b": 2, "s": 0, "h": 3}],
        label=f"{correction:.0f}",
    )
]

EQUAL_ELEMENTS = [
    case
    for name, function in (("ReduceStd", torch.std), ("ReduceStdMean", torch.std_mean))
    for case in over(
        name,
        lambda x, d, k, f=function: f(x, d, correction=1.0, keepdim=k),
        domain=OWN,
        spec=Spec("b s h", make=lambda shape, dtype, _: torch.full(shape, 0.5, dtype=dtype)),
        specials=False,
        sizes=[{"b": 3, "s": 5, "h": 4}],
        label="equal",
    )
]

LP_NORMS = [
    OpCase(
        "onnxtrain",
        "ReduceLp",
        (Spec("b s h"), Spec("1", "int64", value=[1])),
        lambda x, _, p=p: torch.linalg.vector_norm(x, p, 1),
        {"p": p, "keepdims": 0},
        label=str(p),
    )
    for p in (3.0, 1.5, 0.5, 0.0)
]


def some_zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return elements of which about a quarter are 0: rows have none, one or several zeros."""
    x = torch.rand(shape, generator=generator, dtype=torch.float32).to(dtype) + 0.5
    return torch.where(torch.rand(shape, generator=generator) < 0.25, 0.0, x)


ONE_ZERO = [[0.5, -2.0, 1.5, 3.0], [2.0, 0.0, -1.0, 0.5]]

PRODUCTS = [
    *(
        OpCase(OWN, "CumProd", (Spec("b s h", make=make),), lambda x, a=axis: x.cumprod(a), {"axis": axis}, label=label)
        for axis in (1, 2)
        for label, make in ((f"{axis}", None), (f"{axis}-zeros", some_zeros))
    ),
    OpCase(OWN, "CumProd", (Spec("b s", "int64", low=-3, high=3),), lambda x: x.cumprod(1), {"axis": 1}, label="ints"),
    OpCase(
        OWN,
        "CumProdGrad",
        (
            Spec("2 4"),
            Spec("2 4", value=ONE_ZERO),
            Spec("2 4", value=torch.tensor(ONE_ZERO).cumprod(1).tolist()),
        ),
        lambda dy, *_: vjp(lambda t: t.cumprod(1), torch.tensor(ONE_ZERO, dtype=dy.dtype), dy)[1],
        {"axis": 1},
    ),
]

CASES = [*LP_NORMS, *PRODUCTS, *SUMS, *EXTREMES, *LOGICAL, *NORMS, *VARIANCE, *EQUAL_ELEMENTS]
