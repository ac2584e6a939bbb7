"""Images have channels_last memory format between convolutions; the user sees eager's strides."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.tolerance import perturbed
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.norm import batch_norm_channels_last
from onnxtrain.ops.norm.batch_norm import batch_norm, batch_norm_backward
from onnxtrain.system.machine import current_machine
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_each_no_worse, assert_matches
from tests.thinned import covering, slow_but_every
from tests.zoo.checks import compare_named

LAST = torch.channels_last
CONVERSION = "memory_format=torch.channels_last"


class Residual(nn.Module):
    """Convolutions, norms, pooling, a sum; and ops that accept images in any memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> Any:
        stem = self.stem(x)
        inner = stem + self.inner(stem)
        down = self.down(nn.functional.avg_pool2d(inner, 2, ceil_mode=True))
        mixed = torch.cat([inner, stem * 2], 1).permute(0, 2, 3, 1)
        return self.head(down.mean((2, 3))), inner, mixed.softmax(-1), down.flatten(2), down[:, :, ::2]


def results(model: Any, plain: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    plain.zero_grad()
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    outputs = model(leaf)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs]
    parameters = list(plain.parameters())
    gradients = torch.autograd.grad(outputs, [leaf, *parameters], cotangents)
    return [*(o.detach() for o in outputs), *gradients]


def named(model: Any, plain: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {str(number): tensor for number, tensor in enumerate(results(model, plain, x))}


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides of axes of size > 1: for axes of size 1 PyTorch's depend on the number of threads."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def compare(make: Callable[[], nn.Module], x: torch.Tensor) -> str:
    """Compare results, their strides and gradients with eager's; return the forward program."""
    torch.manual_seed(0)
    eager, own, exact = make(), make(), make().double()
    own.load_state_dict(eager.state_dict())
    exact.load_state_dict(eager.state_dict())
    module = ORTModule(own)
    for _ in range(2):  # the second step uses what the first one wrote into buffers
        expected, results = named(eager, eager, x), named(module, own, x)
        reference = named(exact, exact, x.double())
        # The gradient of a bias before batch norm is zero: eager's is rounding noise.
        compare_named("step", results, expected, reference, lambda: [named(e, e, x) for e in perturbed(eager)])
        for name, got in results.items():
            want = expected[name]
            assert strides(got) == strides(want), f"{name}: strides {got.stride()}, eager has {want.stride()}"
    assert_each_no_worse("buffers", *(dict(m.named_buffers()) for m in (own, eager, exact)))
    source: str = engine_of(module).newest().unit.forward.source
    return source


@pytest.mark.parametrize("shape", slow_but_every(2, [(2, 3, 16, 16), (1, 3, 9, 11), (3, 3, 13, 8)]), ids=str)
def test_results_and_strides_match_eager(shape: tuple[int, ...]) -> None:
    source = compare(Residual, torch.randn(shape))
    assert CONVERSION in source


def test_images_are_converted_once_at_the_border() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)
        )

    source = compare(make, torch.randn(2, 3, 12, 12))
    assert source.count(CONVERSION) == 1
    assert source.count("made_contiguous(") == 1


def test_results_of_a_single_pixel_have_the_strides_of_contiguous_images() -> None:
    module = ORTModule(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Sigmoid()))
    result = module(torch.randn(2, 3, 5, 5))
    assert CONVERSION in engine_of(module).newest().unit.forward.source
    assert (result.shape, result.stride()) == ((2, 6, 1, 1), (6, 1, 1, 1))


def test_channels_last_inputs_give_pytorchs_formats() -> None:
    source = compare(Residual, torch.randn(2, 3, 16, 16).contiguous(memory_format=LAST))
    assert CONVERSION not in source
    source = compare(lambda: Residual().to(memory_format=LAST), torch.randn(2, 3, 16, 16))
    assert CONVERSION not in source


def test_a_single_convolution_keeps_its_memory_format() -> None:
    source = compare(lambda: nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.Flatten(2)), torch.randn(2, 3, 16, 16))
    assert CONVERSION not in source


def test_wide_float32_convolutions_stay_contiguous() -> None:
    """PyTorch's kernels for channels_last have 2.7 times the error there, of 128 channels; the tolerance is 2."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.GELU(), nn.Conv2d(128, 128, 3, padding=1), nn.GELU())

    assert CONVERSION not in compare(make, torch.randn(2, 128, 8, 8))
    wide = ORTModule(make().bfloat16())
    wide(torch.randn(2, 128, 8, 8, dtype=torch.bfloat16)).sum().backward()
    assert CONVERSION in engine_of(wide).newest().unit.forward.source


@pytest.mark.parametrize(("channels", "stays"), [(3, True), (8, True), (16, False)])
def test_pointwise_convolutions_of_few_channels_stay_contiguous(channels: int, stays: bool) -> None:
    """PyTorch sums the gradient of such a weight less exactly in channels_last."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, 16, 1), nn.SiLU(), nn.Conv2d(16, channels, 3, padding=1))

    source = compare(make, torch.randn(2, channels, 16, 16))
    assert (CONVERSION not in source) == stays


def test_transposed_and_grouped_convolutions() -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2),
            nn.GELU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Sigmoid(),
            nn.Conv2d(4, 4, 1),
        )

    assert CONVERSION in compare(make, torch.randn(2, 4, 7, 6))


def test_masks_are_sampled_in_eagers_order() -> None:
    """With PyTorch's RNG, dropout samples in memory order: its input must have eager's strides."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.Conv2d(8, 8, 3), nn.Dropout2d(0.5))

    torch.manual_seed(0)
    eager = make()
    module = ORTModule(make(), rng="torch")
    module.load_state_dict(eager.state_dict())
    x = torch.randn(2, 3, 8, 8)

    def seeded(run: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return run(x)  # type: ignore[no-any-return]

    assert_matches(seeded(module, x), seeded, eager, x)


class PermutesImages(nn.Module):
    """Images that a linear layer over their channels leaves in channels_last, before and behind convolutions."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.mixer = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Dropout(drop))
        self.wide = nn.Conv2d(8, 64, 3, padding=1)
        self.head = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> Any:
        stem = self.stem(x)
        mixed = self.mixer(stem.movedim(1, -1)).movedim(-1, 1)
        inner = self.inner(mixed)
        return stem, inner, inner + stem, stem + inner, inner.flatten(2), self.head(self.wide(inner))


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (1, 3, 9, 11)], ids=str)
def test_images_that_are_channels_last_in_eager_remain_so(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    eager = PermutesImages()
    module = ORTModule(PermutesImages())
    module.load_state_dict(eager.state_dict())
    x = torch.randn(shape)
    assert_matches(module(x), eager, x)
    for got, expected in zip(module(x), eager(x), strict=True):
        assert strides(got) == strides(expected)
    assert CONVERSION in engine_of(module).newest().unit.forward.source


def test_masks_of_images_that_are_channels_last_in_eager() -> None:
    torch.manual_seed(0)
    eager = PermutesImages(0.5)
    module = ORTModule(PermutesImages(0.5), rng="torch")
    module.load_state_dict(eager.state_dict())
    x = torch.randn(2, 3, 8, 8)

    def seeded(run: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return run(x)[1]  # type: ignore[no-any-return]

    assert_matches(seeded(module, x), seeded, eager, x)


def test_under_autocast() -> None:
    torch.manual_seed(0)
    eager = Residual()
    module = ORTModule(Residual())
    module.load_state_dict(eager.state_dict())
    x = torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = eager(x), module(x)
    with torch.no_grad():
        exact = Residual().double()
        exact.load_state_dict(eager.double().state_dict())
    for number, (g, e, t) in enumerate(zip(got, expected, exact(x.double()), strict=True)):
        assert_no_worse_than_eager(f"{number}", g, e, t)
        assert g.stride() == e.stride()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of the compiled batch norm, which is loaded."""
    if not current_machine().can_compile:
        pytest.skip("needs a C++ compiler")
    library = batch_norm_channels_last.LIBRARY
    assert library.wait(), library.failure
    names: list[str] = []

    def noted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            names.append(name)
            function(*arguments)

        return call

    functions = {name: noted(name, function) for name, function in vars(library.functions).items()}
    monkeypatch.setattr(library, "functions", SimpleNamespace(**functions))
    return names


@pytest.mark.parametrize("native", [True, False])
def test_a_step_runs_the_compiled_batch_norm_where_it_may(native: bool, calls: list[str]) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3))
    ORTModule(plain, kernels="native" if native else "pytorch")(torch.randn(2, 3, 8, 8)).sum().backward()
    assert calls == (["forward", "backward"] if native else [])


NORMALIZED = (
    *((4, 8, 40, 40), (1, 4, 67, 67), (2, 3, 16, 8), (3, 5, 3, 7), (1, 2, 1, 3), (2, 1, 4, 4), (4, 16, 40, 40)),
    *((3, 37, 13, 11), (1, 64, 1, 3), (8, 19, 64, 64)),
)


@pytest.mark.parametrize(("shape", "compiled"), covering(slow_but_every(3, NORMALIZED), [False, True]), ids=str)
@pytest.mark.parametrize(
    ("training", "behind"), [(True, ""), (True, "relu"), (True, "residual"), (True, "two readers"), (False, "")]
)
def test_batch_norms_are_as_exact_as_for_contiguous_images(
    shape: tuple[int, ...], training: bool, behind: str, compiled: bool, calls: list[str]
) -> None:
    """PyTorch's own kernels for channels_last are not: they accumulate all rows sequentially.

    `behind`: with relu behind, or a residual and relu; of `two readers` dy is a sum.
    """
    torch.manual_seed(0)
    channels, is_sum = shape[1], behind in ("residual", "two readers")
    x, dy, residual = torch.randn(shape) + 0.5, torch.randn(shape), torch.randn(shape)
    scale, b, mean, var = (
        torch.randn(channels),
        torch.randn(channels),
        torch.randn(channels),
        torch.rand(channels) + 0.1,
    )

    if behind:  # rounding across 0 changes the gradient there
        exact_y = nn.functional.batch_norm(x.double(), None, None, scale.double(), b.double(), True, 0.0, 1e-3)
        dy[(exact_y + residual if is_sum else exact_y).abs() < 1e-4] = 0
    added = dy.square()  # and 0 where dy is

    def run(own: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
        x, dy, residual, added, scale, b, mean, var = tensors
        read = (mean, var)
        if training and own:
            y, *moved, saved_mean, saved_deviation = batch_norm(
                x, scale, b, mean, var, residual if is_sum else None, 0.1, 1e-3, bool(behind), compiled
            )
            read = (saved_mean, saved_deviation)
        elif training:
            moved = [mean.clone(), var.clone()]
            y, *saved = torch.native_batch_norm(x, scale, b, *moved, True, 0.1, 1e-3)
            y = y + residual if is_sum else y
            y = torch.relu(y) if behind else y
        else:
            y, moved = torch.batch_norm(x, scale, b, mean, var, False, 0.1, 1e-3, False), []
        if own:
            mask = [True, True, True, is_sum]
            other = (y if behind else None, added if behind == "two readers" else None)
            *grads, dresidual = batch_norm_backward(dy, x, scale, *read, *other, training, 1e-3, mask, compiled)
        else:
            statistics = (None, None, *saved) if training else (mean, var, None, None)
            dresidual = dy + added if behind == "two readers" else dy
            dresidual = dresidual * (y > 0) if behind else dresidual
            grads = torch.ops.aten.native_batch_norm_backward(
                dresidual, x, scale, *statistics, training, 1e-3, [True, True, True]
            )
        return [y, *([dresidual] if is_sum else []), *moved, *grads]

    tensors = (x, dy, residual, added, scale, b, mean, var)
    eager, exact = run(False, *tensors), run(False, *(t.double() for t in tensors))
    last = [t.contiguous(memory_format=LAST) for t in (x, dy, residual, added)]
    got = run(True, *last, *tensors[4:])
    assert_each_no_worse("result", got, eager, exact)
    mixed = run(True, last[0], *tensors[1:])  # only x decides
    assert_each_no_worse("result", mixed, eager, exact)
    if 1 not in shape[1:]:
        assert got[0].is_contiguous(memory_format=LAST)
        assert got[-3].is_contiguous(memory_format=LAST)
    if channels >= 16 and compiled:
        assert set(calls) == ({"forward", "backward"} if training else {"backward"})
    else:
        assert not calls


def far_from_sampled(rows: int, channels: int) -> torch.Tensor:
    """Rows of which those that the mean is estimated from are 5, and the others nearly 0."""
    sampled = [int((i * 0.6180339887498949 % 1) * rows) for i in range(128)]
    x = torch.randn(rows, channels) * 1e-3
    x[sampled] = 5.0
    return x


@pytest.mark.parametrize(
    "make",
    [
        far_from_sampled,
        lambda rows, channels: torch.randn(rows, channels) + 1e3,
        lambda rows, channels: torch.full((rows, channels), 0.1),
        lambda rows, channels: torch.randn(rows, channels) * (torch.arange(rows)[:, None] % 97 == 0),
        lambda rows, channels: torch.cat([torch.zeros(rows - 1, channels), torch.full((1, channels), 1e4)]),
    ],
    ids=["guess is far off", "far from 0", "all the same", "mostly 0", "one is large"],
)
def test_moments_of_rows_with_a_bad_estimate_of_the_mean(
    make: Callable[[int, int], torch.Tensor], calls: list[str]
) -> None:
    torch.manual_seed(0)
    n, side, channels = 4, 32, 24
    x = make(n * side * side, channels).view(n, side, side, channels).permute(0, 3, 1, 2)
    assert x.is_contiguous(memory_format=LAST)
    zeros, ones = torch.zeros(channels), torch.ones(channels)

    def run(own: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        mean, var, values = zeros.to(dtype), ones.to(dtype), x.to(dtype)
        if own:
            y, *moved, saved, inv_std = batch_norm(values, None, None, mean, var, None, 1.0, 1e-5, False, True)
        else:
            moved = [mean, var]
            values = values.contiguous() if dtype == torch.float32 else values
            y, saved, inv_std = torch.native_batch_norm(values, None, None, *moved, True, 1.0, 1e-5)
        return [y, saved, inv_std, *moved]

    results = run(True, torch.float32), run(False, torch.float32), run(False, torch.float64)
    for name, got, eager, exact in zip(("y", "mean", "inv_std", "running mean", "running var"), *results, strict=True):
        assert_no_worse_than_eager(name, got, eager, exact)
    assert calls == ["forward"]


@pytest.mark.parametrize("rows", [(2, 16, 16), (3, 32, 32)], ids=str)
@pytest.mark.parametrize("centre", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_mean_of_a_batch_norms_result_is_as_exact_as_of_contiguous_images(
    rows: tuple[int, ...], centre: float, compiled: bool, calls: list[str]
) -> None:
    """In exact arithmetic it is zero, and a batch norm behind it has that as its running mean.

    The error is the root mean square of 40 sets of values, of which single ones differ by chance.
    """
    n, *sides = rows
    errors = torch.zeros(2, dtype=torch.float64)
    for seed in range(40):
        torch.manual_seed(seed)
        x, scale = torch.randn(n, 16, *sides) + centre * torch.randn(16, 1, 1), torch.rand(16) + 0.5
        y = batch_norm(x.contiguous(memory_format=LAST), scale, None, None, None, None, 0.1, 1e-5, False, compiled)[0]
        eager = torch.native_batch_norm(x, scale, None, None, None, True, 0.1, 1e-5)[0]
        errors += torch.stack([t.double().mean((0, 2, 3)).square().sum() for t in (y, eager)])
    assert errors[0] <= 2**2 * errors[1], f"{(errors[0] / errors[1]).sqrt():.2f} times eager's error"
    assert bool(calls) == compiled
