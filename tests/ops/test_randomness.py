"""Dropout and random tensors: with `rng="torch"` bitwise equal to eager, with `rng="fast"` right in distribution."""

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.autodiff import differentiate
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.random.dropout import dropout, dropout_of_dynamic_ratio, fast_dropout
from onnxtrain.testing import assert_no_worse_than_eager
from tests.op_case import case_graph, run_model
from tests.ops.captures import FunctionModule
from tests.ops.cases_randomness import CASES
from tests.reference import assert_matches
from tests.thinned import slow_except

LAYOUTS = {
    "dense": lambda x: x,
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "one": lambda x: x[0, 0, 0],
    "empty": lambda x: x[:0],
}


def _scale(ratio: float, dtype: torch.dtype) -> float:
    return torch.ones((), dtype=dtype).div_(1 - ratio).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 7, 9), (16, 31, 33)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_dropout_is_bitwise_equal_to_eager(layout, shape, dtype):
    x = layout(torch.randn(shape).to(dtype))
    for ratio in (0.1, 0.123, 0.5, 0.9):
        torch.manual_seed(3)
        expected = F.dropout(x, ratio, True)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        y, mask = dropout(x, 1 - ratio, _scale(ratio, dtype))
        assert torch.equal(y, expected)
        assert y.stride() == expected.stride()
        assert mask.dtype == torch.bool
        assert torch.equal(mask, expected != 0)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("shape", [(5, 7, 9), (16, 31, 33)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fast_dropout_preserves_strides(layout, shape):
    x = layout(torch.randn(shape))
    y, mask = fast_dropout(x, 16384, 4 / 3)
    assert y.stride() == mask.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, x * mask * (4 / 3))


def test_fast_dropout_has_the_given_ratio_and_follows_the_seed():
    x, ratio = torch.ones(1000, 1001), 6554 / 65536
    torch.manual_seed(3)
    y, mask = fast_dropout(x, 6554, 1 / (1 - ratio))
    count, sigma = x.numel(), (ratio * (1 - ratio) / x.numel()) ** 0.5
    assert abs(mask.sum().item() / count - (1 - ratio)) < 4 * sigma
    for axis in (0, 1):  # rows and columns vary as independent samples do
        shares = mask.float().mean(axis)
        assert abs(shares.std() / (ratio * (1 - ratio) / x.shape[axis]) ** 0.5 - 1) < 0.15
    torch.manual_seed(3)
    assert torch.equal(fast_dropout(x, 6554, 1 / (1 - ratio))[0], y)
    assert not torch.equal(fast_dropout(x, 6554, 1 / (1 - ratio))[0], y)


def test_ratios_that_need_no_samples():
    x, state = torch.randn(3, 4), torch.get_rng_state()
    for ratio, training, kept in ((0.0, True, True), (0.3, False, True), (1.0, True, False)):
        y, mask = dropout_of_dynamic_ratio(x, ratio, training)
        assert torch.equal(y, F.dropout(x, ratio, training))
        assert torch.equal(mask, torch.full((3, 4), kept))
    assert torch.equal(torch.get_rng_state(), state)


def _step(module: torch.nn.Module, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return outputs, gradient and the state of the generator, from a fixed seed."""
    x = x.detach().requires_grad_()
    torch.manual_seed(11)
    outputs = module(x)
    state = torch.get_rng_state()
    sum((y * torch.arange(1.0, y.numel() + 1).view(y.shape).to(y.dtype)).sum() for y in outputs).backward()
    return [y.detach() for y in outputs], x.grad, state


def _dropouts(x):
    permuted = F.dropout(x.permute(2, 0, 1), 0.25, True).permute(1, 2, 0)
    return (
        F.dropout(x, 0.1, True),
        F.dropout(permuted.sin(), 0.5, True),
        F.dropout(x, 0.0, True),
        F.dropout(x, 1.0, True),
        F.dropout(x, 0.3, False),
        F.dropout(x * 2, 0.3, True, inplace=True),
        F.dropout1d(x, 0.3, True),
        F.alpha_dropout(x, 0.3, True),
        F.feature_alpha_dropout(x, 0.3, True),
    )


@pytest.mark.parametrize("dtype", slow_except([torch.float32, torch.bfloat16], torch.float32), ids=str)
def test_module_with_dropouts_matches_eager(dtype):
    module = FunctionModule(_dropouts)
    ours = ORTModule(module, rng="torch")
    for sizes in ((3, 4, 6), (2, 5, 6)):
        x = torch.randn(sizes).to(dtype)
        outputs, gradient, state = _step(ours, x)
        expected, expected_gradient, expected_state = _step(module, x)
        _, exact_gradient, _ = _step(module, x.double())
        for y, expected_y in zip(outputs, expected, strict=True):
            assert torch.equal(y, expected_y)
        assert_no_worse_than_eager("gradient", gradient, expected_gradient, exact_gradient)
        assert torch.equal(state, expected_state)


@pytest.mark.parametrize("retraced", [False, True])
def test_unused_dropout_still_samples(retraced):
    """Otherwise later samples would differ from eager's."""

    def forward(x):
        F.dropout(x, 0.5)
        if retraced:  # PyTorch retraces the export to functionalize isclose
            torch.isclose(x, x)
        return F.dropout(x, 0.5)

    x = torch.randn(64)
    ours = ORTModule(FunctionModule(forward), rng="torch")
    torch.manual_seed(0)
    expected, state = forward(x), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(ours(x), expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_fast_dropout_has_the_same_mask_in_forward_and_backward():
    ours = ORTModule(FunctionModule(lambda x: (F.dropout(x, 0.1, True),)), rng="fast")
    x = torch.randn(64, 65)
    (y,), gradient, _ = _step(ours, x)
    scale = torch.ones(()).div_(1 - 6554 / 65536)
    kept = y != 0
    assert 0.05 < 1 - kept.float().mean() < 0.15
    assert torch.equal(y, x * kept * scale)
    weights = torch.arange(1.0, y.numel() + 1).view(y.shape)
    assert torch.equal(gradient, weights * kept * scale)
    assert torch.equal(_step(ours, x)[0][0], y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dropout_and_its_gradient_on_stock_onnxruntime(dtype):
    case = next(c for c in CASES if c.label == "0.1-training")
    joint = differentiate(case_graph(case, dtype), [True], [True, False])
    x, dy = torch.randn(30, 40, 50, dtype=dtype), torch.randn(30, 40, 50, dtype=dtype)
    y, mask, dx = run_model(inline_bodies(joint.model), [x, dy])
    assert 0.09 < 1 - mask.double().mean() < 0.11
    kept = (1 - torch.tensor(0.1)).item()  # onnxruntime's Dropout computes it in float32, whatever the dtype of x
    assert_matches([y, dx], lambda x, dy, mask: [x * mask / kept, dy * mask / 0.9], x, dy, mask)


def _random_tensors(x):
    """Compute with all random ops of ONNX, and with Dropout2d, which PyTorch decomposes into bernoulli."""
    return (
        x + torch.randn_like(x) * torch.rand_like(x),
        x + torch.randn(x.shape[0], 1, 6, dtype=x.dtype) + torch.rand(5, 6, dtype=x.dtype),
        x * torch.bernoulli(x.detach().sigmoid()) + torch.bernoulli(torch.rand_like(x)),
        F.dropout2d(x[None], 0.3, True),
        torch.randn(2, 3, dtype=x.dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_random_tensors_are_bitwise_equal_to_eager(dtype):
    module = FunctionModule(_random_tensors)
    ours = ORTModule(module, rng="torch", fallback_policy="FALLBACK_DISABLE")
    for sizes in ((4, 5, 6), (3, 5, 6)):
        x = torch.randn(sizes).to(dtype)
        outputs, gradient, state = _step(ours, x)
        expected = _step(module, x)
        assert all(map(torch.equal, outputs, expected[0]))
        assert torch.equal(gradient, expected[1])
        assert torch.equal(state, expected[2])
    graph = engine_of(ours).newest().captured.model.graph
    ops = {node.op_type for node in graph}
    assert ops >= {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Dropout"}
    assert "ATen" not in ops


def test_noncontiguous_random_tensors_stay_aten_nodes():
    """PyTorch samples them in memory order."""
    module = FunctionModule(lambda x: (x + torch.randn_like(x.t()).t(),))
    ours = ORTModule(module, rng="torch", fallback_policy="FALLBACK_DISABLE")
    x = torch.randn(3, 4)
    for got, expected in zip(_step(ours, x), _step(module, x), strict=True):
        assert all(map(torch.equal, got, expected))
    assert "ATen" in [node.op_type for node in engine_of(ours).newest().captured.model.graph]
