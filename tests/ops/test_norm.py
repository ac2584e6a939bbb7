"""Captures of PyTorch's normalizations, which run its own kernels: results are bitwise equal."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from onnxtrain import ORTModule
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.ops.modules import check_module, ops_of
from tests.thinned import covering

DTYPES = [torch.float32, torch.bfloat16]


def rows(*lengths: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(n, 5, 8, generator=generator) * 2 + 1] for n in lengths]


def images(*batches: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(n, 6, 5, 4, generator=generator) * 2 + 1] for n in batches]


def randomized(module: nn.Module) -> nn.Module:
    """Set random parameters and statistics instead of ones and zeros."""
    generator = torch.Generator().manual_seed(3)
    for tensor in (*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())):
        tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(8),
        nn.LayerNorm((5, 8)),
        nn.LayerNorm(8, bias=False),
        nn.LayerNorm(8, elementwise_affine=False),
        nn.LayerNorm(8, eps=1e-12),
    ],
    ids=str,
)
def test_layer_norm(module, dtype):
    ours = check_module(randomized(module), *rows(4, 2, 1), dtype=dtype, exact=True)
    domain = "onnxtrain" if module.weight is None else "ai.onnx"
    assert ops_of(ours) == [f"{domain}::LayerNormalization"]


def test_layer_norm_in_double_is_not_onnxs_op():
    """ONNX's statistics would be float32."""
    ours = check_module(randomized(nn.LayerNorm(8)), *rows(4, 2), dtype=torch.float64, exact=True)
    assert ops_of(ours) == ["onnxtrain::LayerNormalization"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "module", [nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-6), nn.RMSNorm((5, 8), elementwise_affine=False)], ids=str
)
def test_rms_norm(module, dtype):
    ours = check_module(randomized(module), *rows(4, 2, 1), dtype=dtype)
    assert ops_of(ours) == ["com.microsoft::SimplifiedLayerNormalization"]


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(8), nn.GroupNorm(1, 5)], ids=str
)
def test_norms_under_autocast(norm):
    """Activations are bfloat16, parameters float32."""
    check_module(nn.Sequential(nn.Linear(8, 8), randomized(norm)), *rows(4, 2), autocast=True)


MODES = [pytest.param(True, id="train"), pytest.param(False, id="eval")]
BATCH_NORMS = [
    nn.BatchNorm2d(6),
    nn.BatchNorm2d(6, momentum=0.3, eps=1e-3),
    nn.BatchNorm2d(6, affine=False),
    nn.BatchNorm2d(6, track_running_stats=False),
    nn.BatchNorm2d(6, affine=False, track_running_stats=False),
]


@pytest.mark.parametrize(("training", "module", "dtype"), covering(MODES, BATCH_NORMS, DTYPES))
def test_batch_norm(training, module, dtype):
    check_module(randomized(module).train(training), *images(4, 2, 1), dtype=dtype, exact=True)


def test_batch_norm_of_rows_and_sequences():
    check_module(randomized(nn.BatchNorm1d(8)), *([x.flatten(0, 1)] for [x] in rows(4, 2)), exact=True)
    check_module(randomized(nn.BatchNorm1d(5)), *rows(4, 2), exact=True)
    check_module(randomized(nn.BatchNorm3d(6)), *([x[..., None]] for [x] in images(4, 2)), exact=True)


class AllButTheFirst(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[1:])


@pytest.mark.parametrize(("training", "affine"), covering(MODES, [True, False]))
def test_batch_norm_of_no_elements_updates_no_statistics(training: bool, affine: bool) -> None:
    """PyTorch's own kernel raises, and that of the gradient crashes the process."""
    for layers, calls in (
        ([nn.BatchNorm1d(8, affine=affine)], [[x.flatten(0, 1)] for [x] in rows(4, 2)]),
        ([nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4, affine=affine), nn.ReLU()], images(4, 2)),
    ):
        module = AllButTheFirst(*map(randomized, layers)).train(training)
        [large, small] = [call[0] for call in calls]
        check_module(module, [large], [small[:1]], [small], [large[:1]], exact=True)
        check_module(module, [small[:1]], [large], exact=True)


def test_batch_norm_in_channels_last():
    module = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    check_module(module, *([x.to(memory_format=torch.channels_last)] for [x] in images(4, 2)))


def test_batch_norm_without_momentum_is_an_average_in_eval_mode():
    check_module(randomized(nn.BatchNorm2d(6, momentum=None)).eval(), *images(4, 2), exact=True)


def test_frozen_batch_norm():
    module = randomized(nn.BatchNorm2d(6)).eval().requires_grad_(False)
    check_module(nn.Sequential(nn.Conv2d(6, 6, 1), module), *images(4, 2))


def test_batch_norm_under_autocast():
    module = nn.Sequential(nn.Conv2d(6, 4, 3), randomized(nn.BatchNorm2d(4)))
    check_module(module, *images(4, 2), autocast=True)
    check_module(module.eval(), *images(4, 2), autocast=True)


@pytest.mark.parametrize(
    ("module", "dtype"),
    covering([nn.GroupNorm(3, 6), nn.GroupNorm(2, 6, affine=False), nn.GroupNorm(6, 6)], DTYPES),
    ids=str,
)
def test_group_norm(module, dtype):
    check_module(randomized(module), *images(4, 2, 1), dtype=dtype, exact=True)


def test_group_norm_in_channels_last():
    calls = [[x.to(memory_format=torch.channels_last)] for [x] in images(4, 2)]
    check_module(randomized(nn.GroupNorm(3, 6)), *calls)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", [nn.InstanceNorm2d(6), nn.InstanceNorm2d(6, affine=True)], ids=str)
def test_instance_norm(module, dtype):
    ours = check_module(randomized(module), *images(4, 2, 1), dtype=dtype, exact=True)
    assert "com.microsoft::BatchNormInternal" in ops_of(ours)


def test_instance_norm_with_running_statistics():
    module = randomized(nn.InstanceNorm2d(6, affine=True, track_running_stats=True))
    check_module(module.eval(), *images(4, 2))


def test_instance_norm_that_updates_statistics_runs_in_pytorch():
    """PyTorch's export loses the update."""
    module = nn.InstanceNorm2d(6, track_running_stats=True)
    [x] = images(4)[0]
    ours = ORTModule(module)
    with pytest.warns(UserWarning, match="running statistics"):
        ours(x)
    assert module.running_mean.abs().sum() > 0


@pytest.mark.parametrize(("dim", "dtype"), covering([0, 1, None], DTYPES), ids=str)
def test_weight_norm(dim, dtype):
    ours = check_module(weight_norm(nn.Linear(8, 3), dim=dim), *rows(4, 2), dtype=dtype)
    assert "onnxtrain::WeightNorm" in ops_of(ours)


def test_weight_norm_of_a_convolution():
    check_module(weight_norm(nn.Conv2d(6, 4, 3)), *images(4, 2))
    check_module(weight_norm(nn.Conv2d(6, 4, 3), dim=1), *images(4, 2))


def test_statistics_of_a_group_norm_are_differentiable():
    def normalize(x, weight, bias):
        return torch.native_group_norm(x, weight, bias, x.shape[0], 6, x.shape[2], 3, 1e-5)

    check_capture(normalize, Spec("b 6 s"), Spec("6"), Spec("6"), sizes=[{"b": 2, "s": 5}, {"b": 3, "s": 4}])


@pytest.mark.parametrize("training", [True, False])
def test_statistics_that_batch_norm_saves(training: bool) -> None:
    """The results of the operator itself: the statistics of the batch in training, empty tensors in eval mode."""

    def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, var = x.new_full((6,), 0.25), x.new_full((6,), 1.5)
        return torch.native_batch_norm(x, weight, bias, mean, var, training, 0.1, 1e-5)

    check_capture(call, Spec("b 6 s"), Spec("6"), Spec("6"), sizes=[{"b": 3, "s": 4}, {"b": 2, "s": 5}])
