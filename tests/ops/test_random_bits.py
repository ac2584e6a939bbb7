"""The random bits of `rng="fast"`: SplitMix64's, uniform, and independent between keys, layers and steps."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.random import keyed_bits
from tests.ops.captures import FunctionModule
from tests.ops.cases_keyed_dropout import word
from tests.reference import assert_each_no_worse
from tests.thinned import slow_except

COUNT = 1 << 18  # words


def key(*halves: int) -> torch.Tensor:
    return torch.tensor(halves)


def bits(seed: torch.Tensor, count: int = COUNT) -> torch.Tensor:
    """Return the 64 bits of each word of a key: [count, 64]."""
    shifts = torch.arange(64)
    return (keyed_bits.random_words(seed, count)[:, None] >> shifts).bitwise_and_(1)


def signs(seed: torch.Tensor, count: int = COUNT) -> torch.Tensor:
    """Return `bits` as -1 and 1."""
    return bits(seed, count).double().mul_(2).sub_(1)


def test_words_are_those_of_splitmix64() -> None:
    """The published outputs for seed 1234567; with a second half of the key, those computed in Python integers."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [w % 2**64 for w in keyed_bits.random_words(key(1234567, 0), 6).tolist()][1:] == expected
    halves = [-(2**63), 2**63 - 1]
    words = keyed_bits.random_words(key(*halves), 200_000).tolist()
    for counter in (0, 1, 65_535, 65_536, 131_072, 199_999):
        assert words[counter] % 2**64 == word(halves, counter)


KEYS = [(0, 0), (1, 0), (0, 1), (-1, -1), (2**40, 12345)]


@pytest.mark.parametrize("halves", slow_except(KEYS, (0, 0), (2**40, 12345)), ids=str)
def test_bits_are_unbiased_and_uncorrelated(halves: tuple[int, int]) -> None:
    """Within 5 standard deviations for 64 bits, and 5.5 for all pairs of them."""
    samples = signs(key(*halves))
    assert samples.mean(0).abs().max() < 5 / COUNT**0.5
    correlations = (samples.T @ samples / COUNT).fill_diagonal_(0)
    assert correlations.abs().max() < 5.5 / COUNT**0.5


def test_words_of_a_stream_are_uncorrelated() -> None:
    samples = signs(key(77, 78))
    for lag in (1, 2, 3, 8, 32, 96, 4096):
        correlations = samples[lag:].T @ samples[:-lag] / (COUNT - lag)
        assert correlations.abs().max() < 5.5 / COUNT**0.5, lag


def test_16_bit_values_are_uniform() -> None:
    """Chi-square over 65536 values: mean 65535, standard deviation 362."""
    counts = torch.bincount(
        keyed_bits.random_words(key(5, 6), 4 * COUNT).view(torch.int16).long() + 32768, minlength=65536
    )
    expected = 16 * COUNT / 65536
    assert abs(((counts - expected) ** 2 / expected).sum().item() - 65535) < 5 * 362


def test_each_bit_of_a_key_changes_half_of_all_bits() -> None:
    original = bits(key(3, 4), 4096)
    for bit in (0, 1, 17, 31, 32, 50, 62):
        share = bits(key(3 ^ 1 << bit, 4), 4096).ne(original).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / (4096 * 64) ** 0.5, bit


def test_keys_that_share_their_first_half_have_uncorrelated_streams() -> None:
    """The first halves are equal, or equal up to a shift of the counter."""
    gamma = 0x9E3779B97F4A7C15
    first = (17 * gamma) % 2**63
    original = signs(key(first, 123456789123456789))
    for second in (987654321987654321, -5555555555555555555):
        other = signs(key(first, second))
        for shift in (0, 1, 17):
            assert abs((original * other.roll(shift, 0)).mean(0)).max() < 5.5 / COUNT**0.5


def test_successive_keys_have_disjoint_uncorrelated_streams() -> None:
    """Layers and steps use successive keys; a word in two streams would mean that these overlap."""
    torch.manual_seed(0)
    streams = [keyed_bits.random_words(keyed_bits.sample_key(), 50_000) for _ in range(20)]
    assert torch.cat(streams).unique().numel() == 20 * 50_000
    samples = torch.stack([s.view(torch.int16) >= 0 for s in streams]).double().mul_(2).sub_(1)
    correlations = (samples @ samples.T / samples.shape[1]).fill_diagonal_(0)
    assert correlations.abs().max() < 5 / samples.shape[1] ** 0.5


def test_keys_follow_the_state_of_the_generator() -> None:
    torch.manual_seed(3)
    first, second, state = keyed_bits.sample_key(), keyed_bits.sample_key(), torch.get_rng_state()
    third = keyed_bits.sample_key()
    torch.manual_seed(3)
    assert torch.equal(keyed_bits.sample_key(), first)
    assert torch.equal(keyed_bits.sample_key(), second)
    torch.set_rng_state(state)
    assert torch.equal(keyed_bits.sample_key(), third)
    assert len({tuple(k.tolist()) for k in (first, second, third)}) == 3


# In modules


class Layers(nn.Module):
    """Three dropouts of one tensor and the dropout of an attention; the outputs show all masks."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = torch.eye(x.shape[-2], dtype=x.dtype).expand(*x.shape[:-1], x.shape[-2])
        attended = F.scaled_dot_product_attention(x, x, values, dropout_p=0.5)
        return F.dropout(x, 0.5), F.dropout(x * 2, 0.5), F.dropout(x.exp(), 0.5), attended


def masks(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return [(y.detach() != 0) for y in module(x)]


@pytest.fixture
def ours() -> ORTModule:
    compiled_kernels.LIBRARIES[torch.float32].wait()  # without a compiler PyTorch's operators sample the same bits
    return ORTModule(Layers(), rng="fast")


def test_masks_of_layers_and_steps_are_independent(ours: ORTModule) -> None:
    x = torch.rand(4, 8, 64, 64) + 0.5
    samples = [m.double().mul_(2).sub_(1).flatten() for _ in range(3) for m in masks(ours, x)]
    count = x.numel()
    for m in samples:
        assert abs(m.mean().item()) < 5 / count**0.5
    for a, b in itertools.combinations(samples, 2):
        for shift in (0, 1, 4, 64):
            assert abs((a * b.roll(shift)).mean().item()) < 5.5 / count**0.5


def test_masks_follow_the_seed_and_a_saved_state(ours: ORTModule) -> None:
    """Also in a new module, as after a restart."""
    x = torch.rand(2, 3, 20, 20) + 0.5
    torch.manual_seed(7)
    steps, states = [], []
    for _ in range(4):
        states.append(torch.get_rng_state())
        steps.append(masks(ours, x))
    torch.manual_seed(7)
    for step in steps:
        assert all(map(torch.equal, masks(ours, x), step))
    torch.set_rng_state(states[2])
    again = ORTModule(Layers(), rng="fast")
    for step in steps[2:]:
        assert all(map(torch.equal, masks(again, x), step))
    assert not torch.equal(steps[0][0], steps[1][0])


def test_compiled_kernels_and_operators_sample_the_same_masks(ours: ORTModule) -> None:
    """A run does not depend on when the compiled kernels become ready, nor on the presence of a compiler."""
    x = torch.rand(2, 3, 19, 23) + 0.5
    operators = ORTModule(Layers(), rng="fast", kernels="pytorch")
    for _ in range(2):
        results = []
        for module in (ours, operators):
            torch.manual_seed(9)
            results.append(masks(module, x))
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize("compiled", [(False, True), (True, False), (True, True), (False, False)], ids=str)
def test_forward_and_backward_may_run_different_kernels(
    compiled: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled kernel may become ready, or unavailable, between forward and backward."""
    library = compiled_kernels.LIBRARIES[torch.float64]
    if not library.wait():
        pytest.skip("needs a C++ compiler")
    functions = library.functions

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25),)

    leaves = [torch.randn(2, 3, 17, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dy = torch.randn(2, 3, 17, 8, dtype=torch.float64)
    module = ORTModule(FunctionModule(attend), rng="fast")
    results = []
    for forward, backward in ((False, False), compiled):
        torch.manual_seed(1)
        monkeypatch.setattr(library, "functions", functions if forward else None)
        (y,) = module(*leaves)
        monkeypatch.setattr(library, "functions", functions if backward else None)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    assert_each_no_worse("result", results[1], results[0], results[0])


def forward_source(ours: ORTModule) -> str:
    return str(engine_of(ours).newest().unit.forward.source)


def test_options_that_exclude_compiled_kernels(ours: ORTModule) -> None:
    x = torch.rand(1, 2, 8, 8)
    ours(x)
    assert "compiled" in forward_source(ours)
    off = ORTModule(Layers(), rng="fast", kernels="pytorch")
    off(x)
    assert "compiled" not in forward_source(off)
    eager = ORTModule(Layers(), rng="torch")
    eager(x)
    assert "compiled" not in forward_source(eager)
    torch.use_deterministic_algorithms(True)
    try:
        exact = ORTModule(Layers(), rng="fast")
        exact(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "compiled" not in forward_source(exact)


def test_backward_saves_the_key_instead_of_the_mask() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    saved: list[torch.Tensor] = []
    module = ORTModule(FunctionModule(lambda x: (F.dropout(x, 0.1),)), rng="fast")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        (y,) = module(x)
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.int64, 2)]
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert torch.equal(gradient != 0, y != 0)


def test_mask_that_the_module_returns_is_bool() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, mask = torch.native_dropout(x, 0.5, True)
        return y, mask

    y, mask = ORTModule(FunctionModule(both), rng="fast")(torch.rand(50, 41) + 1)
    assert mask.dtype == torch.bool
    assert torch.equal(y != 0, mask)
