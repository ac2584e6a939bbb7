"""Views and in-place mutations that a trace loses: each test fails when its guard is removed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import FallbackPolicy, ORTModule
from onnxtrain.errors import CaptureError, ChangedArgumentError, KernelError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_each_no_worse, assert_matches, float64_by_default
from tests.thinned import slow_but_every, slow_except

WIDTH = 4


class Calls(nn.Module):
    """Call a function with the module and the input."""

    def __init__(self, function: Callable[[Calls, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))
        self.register_buffer("seen", torch.ones(WIDTH))
        self.register_buffer("rounded", torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def ours(module: nn.Module) -> ORTModule:
    return ORTModule(module, rng="torch", fallback_policy=FallbackPolicy.FALLBACK_DISABLE)


def assert_as_eager(function: Callable[[Calls, torch.Tensor], torch.Tensor], *, trains: bool = True) -> None:
    """Compare output, gradient, and input and buffers after the call, at several sizes.

    Forward runs the same kernels as eager: its results are bitwise equal.
    """
    module, theirs, exact = Calls(function), Calls(function), Calls(function).double()
    run = ours(module)
    for length in (6, 3):
        x = torch.randn(length, WIDTH)
        mutated_x, wide_x = x.clone(), x.double()
        output, expected = run(mutated_x), theirs(x)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        torch.testing.assert_close(mutated_x, x, rtol=0, atol=0)
        torch.testing.assert_close(dict(module.named_buffers()), dict(theirs.named_buffers()), rtol=0, atol=0)
        if trains:
            output.sum().backward()
            expected.sum().backward()
            with float64_by_default():
                exact(wide_x).sum().backward()
            assert_each_no_worse("gradient", *(m.weight.grad for m in (module, theirs, exact)))


def written(text: str) -> Callable[[Calls, torch.Tensor], torch.Tensor]:
    """Return a function that runs these statements and returns `v` times the weight."""
    source = f"def function(self, x):\n    {text}\n    return v * self.weight"
    scope = {"torch": torch, "F": F, "nn": nn}
    exec(source, scope)
    function: Callable[[Calls, torch.Tensor], torch.Tensor] = scope["function"]  # type: ignore[assignment]
    return function


# Writes to a view reach its base


@pytest.mark.parametrize(
    "text",
    slow_but_every(
        2,
        [
            "v = x * 2; y = F.dropout(v, 0.5, False); y.mul_(2.0)",
            "v = x; y = F.dropout(v, 0.5, False); y.mul_(2.0)",
            "v = x * 2; y = nn.Dropout(0.0)(v); y.mul_(2.0)",
            "v = x * 2; y, _ = torch.broadcast_tensors(v, x); y.mul_(2.0)",
            "v = x; loss = F.mse_loss(v, v + 1); v[-1] = loss",
            "v = x * 2; y = v.type_as(x); y[0].mul_(2.0)",
            "v = x * 2; y = v.sum_to_size(v.shape); y.mul_(2.0)",
            "v = x * 2; y = torch.einsum('ij->ji', v); y[0].mul_(2.0)",
            "v = x; y = v.unsafe_chunk(2)[0]; y.mul_(2.0)",
            "v = x * 2; y = v.unsafe_split(1)[0]; y.mul_(2.0)",
            "v = x; v.fill_diagonal_(3.0)",
            "v = x * 2; v.view(-1, 4).fill_diagonal_(3.0)",
        ],
    ),
)
def test_writes_through_views_that_schemas_do_not_mark(text: str) -> None:
    assert_as_eager(written(text))


# Results that are views of tensors that forward mutates


def returned(text: str) -> Callable[[Calls, torch.Tensor], Any]:
    """Return a function that runs these statements and returns `v`."""
    scope = {"torch": torch}
    exec(f"def function(self, x):\n    {text}\n    return v", scope)
    function: Callable[[Calls, torch.Tensor], Any] = scope["function"]  # type: ignore[assignment]
    return function


def after_a_later_change(run: nn.Module, module: Calls, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a call after the caller changed the input and the buffer, and the input."""
    results = run(x)
    x.mul_(3.0)
    module.seen.sub_(5.0)
    return [*(results if isinstance(results, tuple) else (results,)), x]


@pytest.mark.parametrize(
    "text",
    [
        "x.neg_(); v = x, x[1:], x[:, ::2], x.view(-1), x.t(), x.view(torch.int32), x.expand(2, *x.shape)",
        "v = x[0]; x.mul_(2.0)",
        "self.seen.add_(1.0); v = self.seen[1:], self.seen, self.seen.clone(), x * self.weight",
        "y = x.sum(0); self.seen.copy_(y); v = y, self.seen[:2]",
        "x.zero_(); v = x[1:], x",
    ],
)
def test_a_result_that_is_a_view_of_a_changed_tensor(text: str) -> None:
    module, theirs = Calls(returned(text)), Calls(returned(text))
    run = ours(module)
    for length in (6, 3):
        x = torch.randn(length, WIDTH)
        mine, expected = (after_a_later_change(*side, x.clone()) for side in ((run, module), (theirs, theirs)))
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    assert engine_of(run).captures == 1


def test_an_input_that_forward_changes_and_returns_is_the_same_object() -> None:
    x = torch.randn(WIDTH, 3).t()  # whatever its strides
    assert ours(Calls(returned("x.neg_(); v = x")))(x) is x


def test_a_view_of_a_changed_input_of_other_strides_is_refused() -> None:
    with pytest.raises(CaptureError, match="returns a view of a tensor that it changes in place"):
        ours(Calls(returned("x.neg_(); v = x[1:]")))(torch.randn(WIDTH, 3).t())


def test_a_buffer_whose_strides_change_after_the_capture() -> None:
    module = Calls(returned("self.image.add_(1.0); v = x * 2, self.image[:, 1:]"))
    module.register_buffer("image", torch.zeros(2, 3, 4, 5))
    run = ours(module)
    run(torch.ones(1))
    module.to(memory_format=torch.channels_last)
    with pytest.raises(KernelError, match="differ from those at the capture"):
        run(torch.ones(1))


# Shapes changed in place


@pytest.mark.parametrize(
    "text",
    [
        "v = x[:4] * 2; v.t_(); v[0].mul_(3.0); v = v.t()[:, :4]",
        "v = x * 2; v.unsqueeze_(0)",
        "v = x[:1] * 2; v.squeeze_()",
        "v = x * 2; v.transpose_(0, 1); v = v.t()",
        "v = x * 2; y = v.view(-1); v.unsqueeze_(0); y.mul_(2.0)",
        "v = x * self.weight; v.detach_()",
    ],
)
def test_a_value_whose_shape_changes_in_place(text: str) -> None:
    assert_as_eager(written(text))


@pytest.mark.parametrize("text", ["x.unsqueeze_(0)", "x.t_()", "x.squeeze_()", "self.seen.unsqueeze_(0)"])
def test_an_input_or_buffer_whose_shape_changes_in_place_is_refused(text: str) -> None:
    with pytest.raises(ChangedArgumentError, match="changes the shape or strides"):
        ours(Calls(written(f"v = x * 2; {text}")))(torch.randn(1, WIDTH))


def test_an_input_that_is_detached_in_place_is_refused() -> None:
    with pytest.raises(ChangedArgumentError, match="detaches its argument"):
        ours(Calls(written("v = x * 2; x.detach_()")))(torch.randn(3, WIDTH, requires_grad=True))


def test_an_input_whose_shape_changes_in_place_changes_in_pytorch() -> None:
    x = torch.randn(3, WIDTH)
    with pytest.warns(UserWarning, match="changes the shape or strides"):
        ORTModule(Calls(written("v = x * 2; x.t_()")))(x)
    assert x.shape == (WIDTH, 3)


# `tensor.data`


@pytest.mark.parametrize(
    "text",
    [
        "self.seen.data.mul_(2.0); v = x",
        "v = x + self.seen; self.seen.data.copy_(x.detach().mean(0))",
        "self.seen.data[0] = 5.0; v = x * self.seen",
        "v = x * self.weight; v = v * v.data",
        "v = x; x.data.mul_(2.0)",
    ],
)
def test_data_is_detached(text: str) -> None:
    assert_as_eager(written(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("self.seen.data = self.seen * 2; v = x", "an assignment to tensor.data"),
        ("v = x * self.weight; v.data.mul_(2.0)", "where autograd does not see it"),
        ("self.weight.data.clamp_(0, 1); v = x", "changes a parameter"),
    ],
)
def test_data_that_a_graph_cannot_write_is_refused(text: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        ours(Calls(written(text)))(torch.randn(3, WIDTH))


# Overlapping views


@pytest.mark.parametrize(
    "text",
    [
        "x.detach().expand(2, *x.shape).fill_(0.9); v = x",
        "torch.broadcast_to(self.seen, (2, *self.seen.shape)).zero_(); v = x * self.seen",
        "x.detach().unfold(0, 2, 1).fill_(0.9); v = x",
        "y = x.unfold(0, 2, 1); v = x * torch.select_scatter(y, y[0] * 2, 0, 0).sum()",
    ],
)
def test_a_write_to_an_overlapping_view_is_refused(text: str) -> None:
    """Functionalization would sum the elements that overlap in memory."""
    with pytest.raises(CaptureError, match="elements overlap in memory"):
        ours(Calls(written(text)))(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    "text",
    [
        "y = x * 2; y.unfold(0, 2, 3).fill_(0.9); v = y",
        "y = x * 2; y.unfold(0, 2, 2)[0].mul_(0.9); v = y",
        "y = x * 2; z = y.unfold(1, 2, 2).mT; z += self.weight.mean(); v = y",
    ],
)
def test_a_write_to_an_unfolded_view_is_refused(text: str) -> None:
    """Functionalization sets the elements between the windows to 0."""
    with pytest.raises(CaptureError, match="a view made by unfold"):
        ours(Calls(written(text)))(torch.randn(3, WIDTH))


@pytest.mark.parametrize(
    "text",
    [
        "v = (x * 2)[1:]; v.fill_(0.5)",
        "v = (x * 2)[:, 1].unsqueeze(1).mT; v.zero_(); v = v + 1",
        "v = x.median(0).values; v.zero_()",
        "v = torch.linalg.qr(x).R; v.copy_(torch.ones_like(v))",
    ],
)
def test_what_is_overwritten_has_a_gradient_of_zeros(text: str) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    output = ours(Calls(written(text)))(x)
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_indices_that_change_in_place() -> None:
    """They have no gradient, though the values beside them have one."""
    assert_as_eager(written("w, i = (x * self.weight).topk(1); i.add_(1); v = x * self.weight * i"))


def test_a_view_whose_elements_overlap_is_transposed_in_place() -> None:
    """`t_` writes to no element."""
    assert_as_eager(written("y = x.mean(0).expand(2, 4); y.t_(); v = x * y.sum(1)"))


def test_the_gradient_is_taken_at_the_values_that_forward_read() -> None:
    """Autograd does not see a write to `x.data`: eager's backward reads what was written, which gives no derivative."""
    gradients = []
    overwriting = ours(Calls(written("v = x * self.weight; x.data.fill_(0.5)")))
    for model in (overwriting, Calls(written("v = x * self.weight"))):
        model(torch.ones(3, WIDTH)).sum().backward()
        gradients.append(next(model.parameters()).grad)
    assert torch.equal(*gradients)


# Buffers written from values of another shape or dtype


@pytest.mark.parametrize(
    "text",
    [
        "x.mul_(1.0); self.seen.copy_(x.mean()); v = x * F.silu(self.seen)",
        "x.mul_(1.0); self.rounded.copy_(x.mean(0)); v = x * self.rounded",
    ],
)
def test_a_buffer_that_is_written_keeps_its_shape_and_type(text: str) -> None:
    assert_as_eager(written(text))


# Sizes


@pytest.mark.parametrize("lengths", slow_except([(2, 3, 5, 4), (4, 7, 1)], (2, 3, 5, 4)))
def test_a_decomposition_by_size_serves_such_sizes_only(lengths: tuple[int, ...]) -> None:
    """`tensor_split` of an even length is decomposed into equal parts."""
    run = ours(Calls(written("v = torch.tensor_split(x, 2)[0]; x.mul_(2.0)")))
    for length in lengths:
        assert run(torch.ones(length, WIDTH)).shape == (-(-length // 2), WIDTH)


def test_a_batch_of_one_under_autocast_needs_no_capture_of_its_own() -> None:
    run = ours(Calls(written("v = F.linear(x, torch.eye(4)); x.mul_(2.0)")))
    with torch.autocast("cpu", torch.bfloat16):
        for length in (3, 1, 5):
            run(torch.randn(length, WIDTH))
    assert engine_of(run).captures == 1


def test_groups_of_a_convolution_that_are_a_size() -> None:
    assert_as_eager(written("v = F.conv1d(x[None], torch.ones(x.shape[0], 1, 1), groups=x.shape[0])[0]"))


def test_lengths_of_ctc_loss_that_are_a_size() -> None:
    ones = "torch.ones(x.shape[0], dtype=torch.int64)"
    loss = "F.ctc_loss(v.transpose(0, 1).log_softmax(-1), ones[:, None], ones * v.shape[1], ones)"
    assert_as_eager(written(f"v = torch.stack([x] * 3, 1); ones = {ones}; v = x * {loss}"))


# Ties


@pytest.mark.parametrize("call", ["argsort(0)", "sort(0, descending=True)[1]", "argsort(dim=0, stable=True)"])
def test_equal_elements_come_in_eagers_order(call: str) -> None:
    def order(module: Calls, x: torch.Tensor) -> torch.Tensor:
        twice = torch.cat([x.flatten(), x.flatten(), x.flatten()])
        return eval(f"twice.{call}", {"twice": twice})  # type: ignore[no-any-return]

    assert_as_eager(order, trains=False)


# Whether `reshape` gives a view depends on strides, for which PyTorch's meta functions differ from its kernels


OTHER_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention of transposed heads": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3).transpose(1, 2),
    "attention of a transposed query": lambda x: F.scaled_dot_product_attention(_turned(x), x, x),
    "attention of channels-last tensors": lambda x: F.scaled_dot_product_attention(*[_channels_last(x)] * 3),
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True),
    "batch norm in eval mode": lambda x: F.batch_norm(_turned(x), x.new_zeros(2), x.new_ones(2)),
    "batch norm of channels-last slices": lambda x: F.batch_norm(
        _channels_last(x)[:, :, ::2], None, None, training=True
    ),
    "roll": lambda x: _channels_last(x).roll(1, 1),
    "roll of a turned image": lambda x: _turned(x).roll(1, 1),
    "one-hot": lambda x: F.one_hot((x[0, 0] > 0).long().t(), 2).to(x.dtype),
    "pixels of channels-last channels": lambda x: F.pixel_shuffle(_channels_last(x.repeat(1, 4, 1, 1)), 2),
    "pixels of a turned image": lambda x: F.pixel_shuffle(_turned(x.repeat(1, 4, 1, 1)), 2),
    "channels of channels-last pixels": lambda x: F.pixel_unshuffle(_channels_last(x.repeat(1, 1, 2, 2)), 2),
    "shuffled channels": lambda x: F.channel_shuffle(_channels_last(x.repeat(1, 2, 1, 1)), 2),
    "shuffled channels of a turned image": lambda x: F.channel_shuffle(_turned(x.repeat(1, 2, 1, 1)), 2),
    "shuffled channels of a volume": lambda x: torch.channel_shuffle(
        x.repeat(1, 2, 1, 1)[..., None].repeat(1, 1, 1, 1, 2).contiguous(memory_format=torch.channels_last_3d), 2
    ),
    "a stack of channels-last images": lambda x: torch.stack([_channels_last(x)] * 2, 1),
    "a stack of transposed matrices": lambda x: torch.stack([x[0, 0].t()] * 2, 1),
    "rms norm of channels": lambda x: F.rms_norm(x.movedim(1, -1), (2,)).movedim(-1, 1),
    "a sum of a transposed matrix and a matmul": lambda x: torch.addmm(
        x[0, :2, 0].t(), x[0, :2, 0].t(), x[0, :2, 0, :2]
    ),
    "a sum of transposed matrices and matmuls": lambda x: torch.baddbmm(x[0].mT, x[0].mT, x[0] @ x[0].mT),
    "filling of a turned image": lambda x: _turned(x).masked_fill(_turned(x) > 0, 1.0),
    "filling by a turned mask": lambda x: torch.masked_fill(x[0, 0], _turned(x) > 0, 1.0),
    "pooling without a gradient": lambda x: F.max_pool1d(x.flatten(1, 2).mT, 2),
}


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def _strides(x: torch.Tensor) -> list[int]:
    """The strides of the axes that have more than one element."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


class Applies(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class WritesThroughReshape(Applies):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.reshape(-1).mul_(2.0)
        y.transpose(0, -1).reshape(-1).add_(1.0)
        return y


@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_results_have_eagers_strides(name: str) -> None:
    """Of the operator itself, which no write makes contiguous."""
    function = OTHER_LAYOUTS[name]
    ours = ORTModule(Applies(function), rng="torch", fallback_policy="FALLBACK_DISABLE")
    for sizes in ((2, 2, 4, 5), (3, 2, 1, 5)):
        x = torch.randn(sizes)
        assert_matches(ours(x), function, x)
        assert _strides(ours(x)) == _strides(function(x))


# One layout of each operator: the strides that the trace expects are the ones that the test before compares for all.
ONE_OF_EACH = (
    *("attention", "batch norm", "roll of a turned image", "one-hot", "pixels of channels-last channels"),
    *(
        "channels of channels-last pixels",
        "shuffled channels",
        "a stack of transposed matrices",
        "rms norm of channels",
    ),
    *("a sum of a transposed matrix and a matmul", "filling of a turned image", "pooling without a gradient"),
)


@pytest.mark.parametrize("name", slow_except(OTHER_LAYOUTS, *ONE_OF_EACH))
def test_a_write_through_reshape_arrives_where_it_does_in_eager(name: str) -> None:
    module = WritesThroughReshape(OTHER_LAYOUTS[name])
    ours = ORTModule(copy.deepcopy(module), rng="torch", fallback_policy="FALLBACK_DISABLE")
    for sizes in ((2, 2, 4, 5), (3, 2, 1, 5)):
        x = torch.randn(sizes)
        assert_matches(ours(x), module, x)
        assert _strides(ours(x)) == _strides(module(x))


# An operator that copies where it changes no element


WITHOUT_EFFECT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "repeat": lambda x: x.repeat(1, 1),
    "tile": lambda x: torch.tile(x, (1,)),
    "repeat_interleave": lambda x: x.repeat_interleave(1, 0),
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x])[0],
    "vstack": lambda x: torch.vstack([x]),
    "flip": lambda x: x.flip(()),
    "pad": lambda x: F.pad(x, (0, 0)),
    "diff": lambda x: x.diff(n=0),
}


class CopiesThenWrites(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.function(x)
        x.mul_(2.0)
        return y


@pytest.mark.parametrize("name", slow_except(WITHOUT_EFFECT, "repeat", "cat", "flip", "pad"))
def test_a_copy_of_a_tensor_that_is_written_later_keeps_its_elements(name: str) -> None:
    module = CopiesThenWrites(WITHOUT_EFFECT[name])
    x = torch.randn(3, 4)
    assert_matches(ORTModule(module, rng="torch", fallback_policy="FALLBACK_DISABLE")(x.clone()), module, x)


class SharesAtOneRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1).reshape(-1)  # a view of one row or one column
        x.narrow(1, 0, 1).fill_(-1.0)
        return y


@pytest.mark.parametrize("first", slow_except([(1, 5, 3), (3, 5, 3)], (3, 5, 3)))
def test_a_reshape_that_is_a_view_at_some_sizes_shares_memory_there(first: tuple[int, ...]) -> None:
    ours = ORTModule(SharesAtOneRow(), rng="torch", fallback_policy="FALLBACK_DISABLE")
    for sizes in (first, (1, 5, 3), (4, 5, 3), (5, 1, 3), (1, 1, 3)):
        x = torch.randn(sizes)
        assert_matches(ours(x.clone()), SharesAtOneRow(), x)


class SharesAtOneRowOfARegion(nn.Module):
    """The write is in a region of its own in the trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(0, 1).reshape(-1)
        with torch.no_grad():
            x.narrow(1, 0, 1).fill_(-1.0)
        return y + 0


def test_a_write_in_a_region_reaches_a_reshape_that_is_a_view_at_size_1() -> None:
    ours = ORTModule(SharesAtOneRowOfARegion(), rng="torch", fallback_policy="FALLBACK_DISABLE")
    for sizes in ((3, 5, 3), (1, 5, 3), (4, 5, 3)):
        x = torch.randn(sizes)
        assert_matches(ours(x.clone()), SharesAtOneRowOfARegion(), x)
