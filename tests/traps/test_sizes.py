"""Sizes whose first value a capture could bake in: each case runs at several sizes, in several orders.

A graph may be valid for some sizes only, if its guards say so: other sizes are captured again, never computed wrongly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.thinned import covering, slow_but_every
from tests.zoo.checks import compared
from tests.zoo.entry import Call, Draw, ZooModel, mean_square

WIDTH = 6


def sequences(draw: Draw, batch: int, length: int) -> Call:
    return Call((draw.floats(batch, length, WIDTH, grad=True),))


class Function(nn.Module):
    """Call a function of the inputs and of one linear layer."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(self.inner(inputs[0]), *inputs[1:])


def model(function: Callable[..., torch.Tensor], call: Callable[[Draw, int, int], Call] = sequences) -> ZooModel:
    return ZooModel("function", lambda: Function(function), call, mean_square)


SERVED_BY_ONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "divide by a size": lambda x: x.sum(1) / x.shape[1],
    "multiply by a size": lambda x: x * x.shape[0],
    "root of a size": lambda x: x / x.shape[1] ** 0.5,
    "number of elements": lambda x: x.sum() / x.numel(),
    "half of the positions": lambda x: x[:, : (x.shape[1] + 1) // 2],
    "last position": lambda x: x[:, -1],
    "positions": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None],
    "causal mask": lambda x: (
        (x @ x.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -9.0).softmax(-1)
    ),
    "constant mask": lambda x: x[..., torch.tensor([True, False, True, True, False, True])].view(*x.shape[:2], 2, 2),
    "flatten and back": lambda x: x.reshape(-1, x.shape[-1]).tanh().view(x.shape[0], -1, x.shape[-1]),
    "split heads": lambda x: x.view(*x.shape[:2], 2, 3).transpose(1, 2).flatten(2),
    "expand": lambda x: x.mean(1, keepdim=True).expand(-1, x.shape[1], -1) * x,
    "repeat": lambda x: x.mean(0).repeat(x.shape[0], 2, 1),
    "concatenate": lambda x: torch.cat([x, x.flip(1), torch.zeros(x.shape[0], 1, WIDTH, dtype=x.dtype)], 1),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "new tensor": lambda x: x + x.new_ones(x.shape[0], 1, 1) * x.new_full((x.shape[1], 1), 0.5),
    "statistics": lambda x: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1).sqrt(),
    "outer product": lambda x: torch.einsum("bld,bmd->blm", x, x),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)),
}
SIZES = ((3, 4), (1, 5), (4, 1), (1, 1), (WIDTH, WIDTH))
# Both sizes 1 covers each of them; the cases with only one size 1 are slow tests.
PLACES = [
    pytest.param(
        i, id="first-{}-{}".format(*sizes), marks=[pytest.mark.slow] if (1 in sizes) and sizes != (1, 1) else []
    )
    for i, sizes in enumerate(SIZES)
]


@pytest.mark.parametrize(("first", "name"), covering(PLACES, slow_but_every(2, SERVED_BY_ONE)))
def test_one_capture_serves_all_sizes(first: int, name: str) -> None:
    """In any order of sizes: a size of 1 does not mean broadcasting, and equal sizes are not one symbol."""
    with compared(model(SERVED_BY_ONE[name]), captures=1) as compare:
        for sizes in SIZES[first:] + SIZES[:first]:
            compare.train(*sizes)


GUARDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeeze": lambda x: x.squeeze(1) * 2,
    "squeeze all": lambda x: x.squeeze() * 2,
    "branch on batch 1": lambda x: x * 2 if x.shape[0] == 1 else x * 3,
    "branch on length": lambda x: x * 2 if x.shape[1] > 4 else x * 3,
    "branch on equal sizes": lambda x: x * 2 if x.shape[0] == x.shape[1] else x * 3,
    "branch on divisibility": lambda x: x * 2 if x.shape[1] % 2 else x * 3,
    "loop over positions": lambda x: torch.stack([x[:, i] * i for i in range(x.shape[1])], 1),
    "math of a size": lambda x: x / math.sqrt(x.shape[1]) + math.log(x.shape[0]),
    "size as int": lambda x: x * int(x.shape[1] * 0.5),
    "size as float": lambda x: x * float(x.shape[1]),
    "chunks": lambda x: sum(c.sum(1) * (i + 1) for i, c in enumerate(x.chunk(2, 1))),  # type: ignore[return-value, misc]
    "length as text": lambda x: x * len(str(x.shape[1])),
    "unbind": lambda x: sum(part * (i + 1) for i, part in enumerate(x.unbind(0))),  # type: ignore[return-value, misc]
    "square only": lambda x: x + x.mT if x.shape[1] == x.shape[2] else x,
}


@pytest.mark.parametrize(("first", "name"), covering(PLACES, slow_but_every(2, GUARDED)))
def test_sizes_that_decide_the_graph_lead_to_another_capture(first: int, name: str) -> None:
    with compared(model(GUARDED[name]), captures=None) as compare:
        for sizes in SIZES[first:] + SIZES[:first]:
            compare.train(*sizes)


# Two inputs that broadcast against each other

SHAPES = ((3, 4), (1, 4), (3, 1), (1, 1))
FIRST = [pytest.param(i, id="first-{}-{}".format(*shape)) for i, shape in enumerate(SHAPES)]
OF_TWO: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(y > 0, x, y),
    "matmul": lambda x, y: (x @ y.mT).sum(-1),
}


@pytest.mark.parametrize(("first", "name"), covering(FIRST, slow_but_every(2, OF_TWO)))
def test_an_input_that_broadcasts_at_some_sizes_only(first: int, name: str) -> None:
    """The second input has size 1 or the first's size: its gradient is summed only if it broadcasts."""

    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(3, 4, WIDTH, grad=True), draw.floats(batch, length, WIDTH, grad=True)))

    with compared(model(OF_TWO[name], call), captures=None) as compare:
        for shape in SHAPES[first:] + SHAPES[:first]:
            compare.train(*shape)


@pytest.mark.parametrize(
    "order", slow_but_every(2, itertools.permutations([(1, 1), (1, 4), (3, 1), (3, 4)], 2)), ids=str
)
def test_two_inputs_that_broadcast_each_other(order: tuple[tuple[int, int], ...]) -> None:
    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(batch, 1, WIDTH, grad=True), draw.floats(length, WIDTH, grad=True)))

    with compared(model(lambda x, y: x * y - y, call), captures=None) as compare:
        for sizes in order:
            compare.train(*sizes)


def test_an_attention_mask_for_all_rows_or_for_each() -> None:
    def call(draw: Draw, batch: int, length: int) -> Call:
        mask = torch.arange(4) < torch.arange(4, 4 - length, -1)[:, None]
        return Call((draw.floats(batch, 4, WIDTH, grad=True), mask[:, None, :].expand(length, 4, 4).contiguous()))

    def attend(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    with compared(model(attend, call), captures=None) as compare:
        for batch, rows in ((3, 3), (3, 1), (1, 1), (2, 2), (2, 1)):
            compare.train(batch, rows)


# Empty inputs, and an int among the outputs


def test_a_batch_of_no_rows() -> None:
    with compared(
        ZooModel("sum", lambda: Function(torch.tanh), sequences, lambda out: out.sum()), captures=None
    ) as compare:
        for sizes in ((3, 4), (0, 4), (3, 4), (0, 4), (3, 0)):
            compare.train(*sizes)


class ReturnsSizes(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {
            "x": x * 2,
            "batch": x.shape[0],
            "elements": x.numel(),
            "half": x.shape[1] // 2,
            "shape": tuple(x.shape),
        }


def test_sizes_among_the_outputs() -> None:
    entry = ZooModel("sizes", ReturnsSizes, sequences, lambda out: out["x"].sum())
    with compared(entry) as compare:
        for sizes in SIZES:
            compare.train(*sizes)


# Other ranks, dtypes and layouts are different calls


def test_another_rank_dtype_or_layout_is_another_capture() -> None:
    shapes = {1: (3, WIDTH), 2: (2, 3, WIDTH), 3: (2, 2, 3, WIDTH)}

    def call(draw: Draw, batch: int, length: int) -> Call:
        return Call((draw.floats(*shapes[batch], grad=True),))

    with compared(model(lambda x: x.softmax(0), call), captures=3) as compare:
        for rank in (1, 2, 3, 1):
            compare.train(rank, 0)


@pytest.mark.parametrize("first", [False, True])
def test_inputs_that_are_not_contiguous(first: bool) -> None:
    now = {"turned": first}

    def call(draw: Draw, batch: int, length: int) -> Call:
        x = draw.floats(batch, WIDTH, length) if now["turned"] else draw.floats(batch, length, WIDTH)
        return Call((x.mT if now["turned"] else x,))

    with compared(model(lambda x: x.tanh() + x.transpose(0, 1).mean(), call), captures=None) as compare:
        for now["turned"] in (first, not first, first):
            compare.train(3, 4)


# A size computed from an input's size: 1 in the first call, larger in another


def kl_of_parts(x: torch.Tensor, wide_target: bool, reduction: str) -> torch.Tensor:
    first, rest = x.log_softmax(-1).split([1, x.shape[0] - 1])
    x, target = (first, rest) if wide_target else (rest, first)
    return F.kl_div(x, target.exp(), reduction=reduction)


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    # The gradient in the narrow input of a mean of n elements was n times too large.
    "kl_div of a wide target": lambda x: kl_of_parts(x, True, "mean"),
    "kl_div of a narrow target": lambda x: kl_of_parts(x, False, "mean"),
    "sum of kl_div of a wide target": lambda x: kl_of_parts(x, True, "sum"),
    "sum of kl_div of a narrow target": lambda x: kl_of_parts(x, False, "sum"),
}


ORDERS = [
    pytest.param(((2, 3), (5, 3), (3, 4)), id="1 first"),
    pytest.param(((5, 3), (2, 3), (3, 4)), id="1 later"),
]


@pytest.mark.parametrize(("sizes", "name"), covering(ORDERS, COMPUTED))
def test_a_computed_size_that_is_1_at_some_sizes(sizes: tuple[tuple[int, int], ...], name: str) -> None:
    with compared(model(COMPUTED[name]), captures=None) as compare:
        for batch, length in sizes:
            compare.train(batch, length)


def test_a_size_that_a_guard_fixes_is_no_size_of_another_capture() -> None:
    """The second capture has the same nodes with 25 instead of 9."""

    def sorted_pairs(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.cartesian_prod(x[:, 0, 0], x[:, 0, 0])
        return torch.take_along_dim(pairs, pairs.argsort(0), 0)

    with compared(model(sorted_pairs), captures=None) as compare:
        for batch in (3, 5, 3):
            compare.train(batch, 4)
