"""The compiled kernels against PyTorch, in all cases of their ops; and the dropout masks that both sample."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain import ORTModule
from onnxtrain.native import Library
from onnxtrain.ops import builder
from onnxtrain.ops.activation import compiled_kernels as activations
from onnxtrain.ops.attention import compiled_kernels, flash
from onnxtrain.ops.attention.kernel_arguments import DropoutOptions, PackedSequences, ScoreOptions
from onnxtrain.ops.attention.masks import causal_mask, is_causal_mask
from onnxtrain.ops.loss import cross_entropy_saving_logits as cross_entropy
from onnxtrain.ops.norm import rms_norm_kernels
from onnxtrain.ops.random import keyed_bits, relu_dropout
from onnxtrain.ops.recurrent import compiled_lstm, layer_kernels
from onnxtrain.ops.recurrent.cells import LSTM
from onnxtrain.testing import assert_no_worse_than_eager
from tests.machines import Describe
from tests.op_case import CaseCheck, OpCase
from tests.ops import (
    cases_activation,
    cases_attention,
    cases_dense_varlen_attention,
    cases_keyed_dropout,
    cases_loss,
    cases_norm,
)
from tests.ops.captures import FunctionModule
from tests.ops.compiled_candidates import compiled_for, let_cases_compile, on_other_processors
from tests.reference import assert_matches
from tests.thinned import covering

pytestmark = pytest.mark.compiler

OPS = {
    "FlashAttention",
    "MemoryEfficientAttention",
    "MemoryEfficientAttentionGrad",
    "VarlenAttention",
    "VarlenAttentionGrad",
    "KeyedDropout",
    "ReluDropout",
    "ReluDropoutGrad",
}
CASES = [
    case
    for module in (cases_attention, cases_dense_varlen_attention, cases_keyed_dropout)
    for case in module.CASES
    if case.name in OPS
]
BY_OPERATORS = tuple(f"VarlenAttention-{label}" for label in ("bias", "one-bias"))


class Operators(TorchDispatchMode):
    """Record the operators with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def counting(library: Library, calls: Counter[str]) -> SimpleNamespace:
    """The library's functions; `calls` counts their calls."""
    assert library.wait(), library.failure

    def counted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> None:
            calls[name] += 1
            function(*arguments)

        return call

    return SimpleNamespace(**{name: counted(name, function) for name, function in vars(library.functions).items()})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, described_machine: Describe) -> Counter[str]:
    """Run compiled kernels in the graphs of cases; count their calls."""
    counts: Counter[str] = Counter()
    for library in (*compiled_kernels.LIBRARIES.values(), keyed_bits.LIBRARY, cross_entropy.LIBRARY):
        monkeypatch.setattr(library, "functions", counting(library, counts))
    monkeypatch.setattr(cross_entropy, "_MIN_SCORES", 1)
    let_cases_compile(monkeypatch)
    monkeypatch.setattr(flash, "_compiled_is_faster", lambda *_: True)
    described_machine("avx2")  # bfloat16 too
    return counts


@pytest.mark.parametrize(("case", "dtype"), covering(CASES, [torch.float32, torch.float64, torch.bfloat16]), ids=str)
def test_matches_autograd(case: OpCase, dtype: torch.dtype, calls: Counter[str]) -> None:
    check = CaseCheck(case, dtype)
    ran = [check.check_sizes(sizes) for sizes in case.size_sets()]
    assert ran[0]
    samples_nothing = case.name == "ReluDropoutGrad" and dtype == torch.bfloat16  # masks are made in any case
    assert bool(calls) != (samples_nothing or str(case).endswith(BY_OPERATORS))


@pytest.mark.parametrize("native", [True, False])
def test_nan_passes_relu_and_dropout(native: bool, calls: Counter[str]) -> None:
    x = SPECIAL.repeat(16)
    key = torch.tensor([12345, 678])
    forward, backward = (
        (relu_dropout.relu_drop_compiled, relu_dropout.backward_compiled)
        if native
        else (relu_dropout.relu_drop, relu_dropout.backward)
    )
    expected = keyed_bits.drop(x.relu(), key, 6554, 1.25)
    y = forward(x, key, 6554, 1.25)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    dx = backward(torch.full_like(x, 3.0), y, 1.25)
    torch.testing.assert_close(dx, torch.where(y <= 0, 0.0, 3.75), rtol=0, atol=0)
    assert bool(calls) == native


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", [c for c in cases_loss.CASES if c.name.startswith("CrossEntropy")], ids=str)
def test_cross_entropy_matches_autograd(case: OpCase, dtype: torch.dtype, calls: Counter[str]) -> None:
    check = CaseCheck(case, dtype)
    ran = [check.check_sizes(sizes) for sizes in case.size_sets()]
    assert ran[0]
    assert bool(calls) != str(case).endswith("-3d")


SPECIAL = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 90.0, -90.0, 1e-30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(128, 128), (5, 7, 471), (40, 1001)], ids=str)  # full vectors, and remainders
def test_tanh_gelu_matches_autograd(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))

    def eager(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = torch.nn.functional.gelu(x, approximate="tanh")
        return [y.detach(), *torch.autograd.grad(y, x, dy)]

    x, dy = torch.randn(shape, dtype=dtype) * 4, torch.randn(shape, dtype=dtype)
    x.view(-1)[:8] = SPECIAL
    got = activations.tanh_gelu(x), activations.tanh_gelu_backward(dy, x)
    for label, ours, theirs, exact in zip(("y", "dx"), got, eager(x, dy), eager(x.double(), dy.double()), strict=True):
        assert_no_worse_than_eager(label, ours, theirs, exact)
    assert len(counts) == 2


@pytest.mark.parametrize(("low", "high"), [(0, 12), (0, 1e-3), (3, 6)], ids=["wide", "near 0", "tail"])
@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("count", [128 * 128 + 5, 80], ids=["compiled", "small"])
def test_exact_gelu_is_as_accurate_as_erf(
    count: int, sign: int, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's gelu is off by 1e-6 near -3.5, where gelu is 8e-4: more than twice what the formula is off."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))

    def written_out(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        y = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
        return [y.detach(), *torch.autograd.grad(y, x, dy)]

    x, dy = torch.empty(count).uniform_(low, high) * sign, torch.randn(count)
    special, ones = torch.cat([SPECIAL, x]), torch.ones(count + 8)
    expected, exact = written_out(x, dy), written_out(x.double(), dy.double())
    got = activations.exact_gelu(x), activations.exact_gelu_backward(dy, x)
    for label, ours, theirs, right in zip(("y", "dx"), got, expected, exact, strict=True):
        assert_no_worse_than_eager(label, ours, theirs, right)
    assert torch.equal(activations.exact_gelu_backward_(dy, x), got[1])
    got = activations.exact_gelu(special), activations.exact_gelu_backward(ones, special)
    assert_matches([y[:8] for y in got], written_out, SPECIAL, ones[:8])
    assert counts == ({"exact_gelu_float": 2, "exact_gelu_backward_float": 3} if count > 1000 else {})


def test_only_large_tanh_gelu_runs_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))
    rows = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU("tanh"), torch.nn.Linear(256, 8))
    model = ORTModule(rows, recompute="none")
    for count, calls in ((8, {}), (64, {"tanh_gelu_float": 1, "tanh_gelu_backward_float": 1})):
        model(torch.randn(count, 64)).sum().backward()
        assert counts == calls


def test_gelu_of_gpt2_runs_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass fuses GPT-2's elementwise ops to FastGelu, and keeps their metadata that allows compiled kernels."""
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(64, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return gelu(self.up(x)).square().sum()

    ORTModule(Block(), recompute="none")(torch.randn(64, 64)).backward()
    assert counts == {"tanh_gelu_float": 1, "tanh_gelu_backward_float": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("activation", activations.COMPILED_GATES)
@pytest.mark.parametrize("layout", ["separate", "halves", "slice"])
@pytest.mark.parametrize("shape", [(128, 128), (5, 7, 471), (40, 1, 1001)], ids=str)  # whole vectors, and rests
def test_gated_activation_matches_autograd(
    shape: tuple[int, ...], layout: str, activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))
    dy, *inputs = (torch.randn(shape, dtype=dtype) for _ in range(3))
    inputs[0] = inputs[0] * 4
    inputs[0].view(-1)[:8] = SPECIAL
    if layout == "halves":  # the two halves of one matmul's result
        inputs = list(torch.cat(inputs, -1).chunk(2, -1))
    elif layout == "slice":
        inputs[0] = torch.cat([*inputs, dy], -1)[..., : shape[-1]]

    def eager(wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in inputs]
        y = cases_activation.ACTIVATIONS[activation](leaves[0]) * leaves[1]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(wide))]

    got = activations.gated(*inputs, activation), *activations.gated_backward(dy, *inputs, activation)
    for label, ours, theirs, exact in zip(("y", "dgate", "dup"), got, eager(dtype), eager(torch.float64), strict=True):
        assert_no_worse_than_eager(label, ours, theirs, exact)
    assert len(counts) == 2


def test_gated_rows_with_unsupported_strides_run_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))
    gate, up, dy = (torch.randn(12, 40, 50) for _ in range(3))
    permuted = (gate.mT.contiguous().mT, gate.transpose(0, 1).contiguous().transpose(0, 1))
    for x in (*permuted, gate[:1].expand(12, 40, 50)):
        assert_matches(activations.gated(x, up, "silu"), activations.aten_gated, x, up, "silu")
        grads = activations.gated_backward(dy, x, up, "silu")
        assert_matches(grads, activations.aten_gated_backward, dy, x, up, "silu")
    assert not counts
    activations.gated_backward(dy, gate, up, "silu")
    assert counts == {"gated_silu_backward_float": 1}


@pytest.mark.parametrize("halves", [False, True], ids=("apart", "halves"))
def test_a_gated_block_runs_the_compiled_kernel(halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(activations.LIBRARY, "functions", counting(activations.LIBRARY, counts))

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(256, 8)
            self.apart = torch.nn.Linear(64, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = self.wide(x).chunk(2, -1)
            return self.down(torch.nn.functional.silu(gate) * (up if halves else self.apart(x)))  # type: ignore[no-any-return]

    for rng, calls in (("fast", {"gated_silu_float": 1, "gated_silu_backward_float": 1}), ("torch", {})):
        counts.clear()
        ORTModule(Block(), recompute="none", rng=rng)(torch.randn(80, 64)).sum().backward()
        assert counts == calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in cases_norm.CASES if c.name.startswith("Simplified")], ids=str)
def test_rms_norm_of_few_elements_matches_autograd(
    case: OpCase, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, calls: Counter[str]
) -> None:
    monkeypatch.setattr(rms_norm_kernels, "_MIN_ELEMENTS", 1)
    monkeypatch.setattr(rms_norm_kernels.LIBRARY, "functions", counting(rms_norm_kernels.LIBRARY, calls))
    check = CaseCheck(case, dtype)
    ran = [check.check_sizes(sizes) for sizes in case.size_sets()]
    assert ran[0]
    assert bool(calls) == (dtype != torch.bfloat16 and "mixed" not in str(case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("shape", "axis"), [((128, 128), 1), ((5, 7, 471), 2), ((33, 8, 80), 1), ((3, 17, 1001), 2)], ids=str
)
@pytest.mark.parametrize("scaled", [True, False], ids=("scaled", "plain"))
@pytest.mark.parametrize("sum_", [True, False], ids=("sum", "alone"))
def test_rms_norm_matches_autograd(
    shape: tuple[int, ...], axis: int, scaled: bool, sum_: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(rms_norm_kernels.LIBRARY, "functions", counting(rms_norm_kernels.LIBRARY, counts))
    epsilon = 1e-6

    def eager(x: torch.Tensor, scale: torch.Tensor | None, dy: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, scale) if t is not None]
        y = torch.nn.functional.rms_norm(leaves[0], shape[axis:], *leaves[1:], eps=epsilon)
        dx, *others = torch.autograd.grad(y, leaves, dy)
        return [y.detach(), dx if added is None else dx + added, *others]

    x, dy = torch.randn(shape, dtype=dtype) * 3, torch.randn(shape, dtype=dtype)
    added = torch.randn(shape, dtype=dtype) if sum_ else None
    scale = torch.randn(shape[axis:], dtype=dtype) if scaled else None
    x.view(-1, x[(0,) * axis].numel())[1] = 0  # epsilon alone
    y, inv_std = rms_norm_kernels.rms_norm(x, axis, scale, epsilon)
    dx, dscale = rms_norm_kernels.rms_norm_backward(dy, x, scale, inv_std, added, axis, [True, True])
    assert len(counts) == 2
    assert (dscale is None) == (scale is None)
    exact = eager(x.double(), None if scale is None else scale.double(), dy.double())
    for label, ours, theirs, right in zip(
        ("y", "dx", "dscale"), (y, dx, dscale), eager(x, scale, dy), exact, strict=False
    ):
        assert_no_worse_than_eager(label, ours, theirs, right)
    for mask in ([True, False], [False, True]):
        one = rms_norm_kernels.rms_norm_backward(dy, x, scale, inv_std, added, axis, mask)
        assert [g is None for g in one] == [not mask[0], not mask[1] or scale is None]
        assert all(g is None or torch.equal(g, both) for g, both in zip(one, (dx, dscale), strict=True))


def test_rms_norm_of_infinity_and_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rms_norm_kernels.LIBRARY.wait()
    x = torch.randn(64, 257)
    x[1, 3], x[2, 256], x[5, 0] = torch.inf, torch.nan, -torch.inf
    y, _ = rms_norm_kernels.rms_norm(x, 1, None, 1e-5)
    assert_matches(y, lambda x: torch.nn.functional.rms_norm(x, (257,), eps=1e-5), x)


@pytest.mark.parametrize("label", [7, -1])
def test_cross_entropy_raises_for_an_invalid_label(label: int, calls: Counter[str]) -> None:
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        cross_entropy.compiled_loss(torch.randn(3, 7), torch.tensor([0, label, -100]), None, 1, -100)
    assert calls["forward_float"] == 1


def test_cross_entropy_reads_no_labels_in_operators(calls: Counter[str]) -> None:
    """In backward of small steps, each operator besides the kernel takes as long as 2000 scores."""
    scores, labels = torch.randn(3, 7), torch.tensor([0, 2, -100])
    _, peak, log_sum, total = cross_entropy.compiled_loss(scores, labels, None, 1, -100)
    with Operators() as operators:
        dx = cross_entropy.compiled_gradient(torch.ones(()), scores, peak, log_sum, labels, None, total, 1, -100)
    assert calls["backward_float"] == 1
    assert not any(arg is labels for _, args in operators.calls for arg in args)
    assert not dx[2].any()


def test_attention_calls_no_operators(calls: Counter[str]) -> None:
    """For [4, 2, 32, 32], creating the results by operators took a sixth of the call."""
    q, k, v = (x.unflatten(2, (2, 32)).transpose(1, 2) for x in torch.randn(4, 32, 192).split(64, 2))
    scores, dropout = ScoreOptions(causal=True, safe=True), DropoutOptions(keyed_bits.sample_key(), 6554, 1.1)
    with Operators() as operators:
        y, _ = compiled_kernels.forward(q, k, v, scores, dropout)  # type: ignore[misc]
        gradients = compiled_kernels.backward(y, q, k, v, scores, dropout)
    assert calls["forward_float"] == calls["backward_float"] == 1
    assert not operators.calls
    assert gradients is not None
    assert all(x.stride() == (2048, 32, 64, 1) for x in (y, *gradients))


@pytest.mark.parametrize(("shape", "asks"), [((16, 2), False), ((64, 64), True)], ids=str)
def test_cross_entropy_of_few_scores_compiles_nothing(
    shape: tuple[int, int], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[str] = []
    monkeypatch.setattr(Library, "request", lambda library: requested.append(library.name))
    scores, target = torch.randn(shape, requires_grad=True), torch.randint(shape[1], shape[:1])
    module = ORTModule(FunctionModule(lambda x, y: (torch.nn.functional.cross_entropy(x, y),)))
    (loss,) = module(scores, target)
    loss.backward()
    assert ("cross_entropy" in requested) == asks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cross_entropy_of_scores_far_from_zero(dtype: torch.dtype, calls: Counter[str]) -> None:
    """Peak + log_sum would lose the fraction; and rows whose scores but one are -inf."""
    scores = torch.randn(5, 1003, dtype=torch.float64) + torch.tensor([3e4, -2e4, 0.0, 1e-3, 7e5]).double()[:, None]
    scores[2, 1:] = -torch.inf
    target = torch.tensor([3, 1002, 0, 500, 7])

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        loss, peak, log_sum, total = cross_entropy.compiled_loss(x, target, None, 1, -100)
        dy = torch.ones((), dtype=x.dtype)
        return [loss, cross_entropy.compiled_gradient(dy, x, peak, log_sum, target, None, total, 1, -100)]

    def eager(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x, target)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    scores = scores.to(dtype)
    for name, got, plain, exact in zip(
        ("loss", "gradient"), run(scores), eager(scores), eager(scores.double()), strict=True
    ):
        assert_no_worse_than_eager(name, got, plain, exact)
    assert len(calls) == 2


def heads(batch: int, count: int, length: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return [b, h, l, e], a slice of a joint projection to q, k and v, with strides in three axes."""
    return torch.randn(batch, length, 3, count, width).to(dtype)[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("lengths", "widths", "kv_heads", "causal"),
    [((128, 128), (32, 32), 4, False), ((33, 70), (64, 48), 2, True), ((200, 65), (80, 5), 1, False)],
    ids=str,
)
def test_attention_with_dropout_matches_autograd_with_the_same_mask(
    lengths: tuple[int, int], widths: tuple[int, int], kv_heads: int, causal: bool, dtype: torch.dtype
) -> None:
    assert compiled_kernels.LIBRARIES[dtype].wait()
    (rows, columns), drop_count = lengths, 6554
    q, dy = heads(3, 4, rows, widths[0], dtype), torch.randn(3, 4, rows, widths[1]).to(dtype)
    k, v = (heads(3, kv_heads, columns, width, dtype) for width in widths)
    bias = torch.randn(1, 4, rows, columns).to(dtype)
    visible = torch.rand(3, 1, 1, columns) < 0.8
    key = keyed_bits.sample_key()
    bits = cases_keyed_dropout.keyed_samples(key, 12 * rows * columns).view(3, 4, rows, columns)
    dropout_mask = bits >= drop_count - 2**15

    def reference(wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v, bias)]
        repeated_k, repeated_v = (x.repeat_interleave(4 // kv_heads, 1) for x in leaves[1:3])
        scores = (leaves[0] @ repeated_k.mT / math.sqrt(widths[0]) + leaves[3]).masked_fill(~visible, -1e4)
        if causal:
            scores = scores.masked_fill(torch.ones(rows, columns, dtype=torch.bool).triu(1), -math.inf)
        y = (torch.softmax(scores, -1) * dropout_mask / (1 - drop_count / 2**16)) @ repeated_v
        return [y, *torch.autograd.grad(y, leaves, dy.to(wide))]

    scores = ScoreOptions(None, bias, visible, -1e4, causal, safe=False)
    dropout = DropoutOptions(key, drop_count, 1 / (1 - drop_count / 2**16))
    forward = compiled_kernels.forward(q, k, v, scores, dropout)
    assert forward is not None
    backward = compiled_kernels.backward(dy, q, k, v, scores, dropout, output_dscores=True)
    assert backward is not None
    results = [forward[0], *backward[:3], backward[3].sum(0, keepdim=True)]
    for name, got, eager, exact in zip(
        ("y", "dq", "dk", "dv", "dbias"), results, reference(dtype), reference(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, eager.detach(), exact.detach())


def _masks(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Return additive masks of scores [3, 4, rows, columns], by name."""
    is_later = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    minimum = torch.finfo(torch.float32).min
    padding = torch.zeros(3, 1, 1, columns)
    padding[0, ..., 20:], padding[1, ..., 1:] = minimum, -math.inf
    left_padding = torch.zeros(3, 1, rows, columns).masked_fill_(is_later, minimum)
    left_padding[1, ..., :40] = minimum  # rows before the 40th are fully masked
    bias = torch.randn(1, 4, rows, columns)
    full_padding = padding.clone()
    full_padding[2] = minimum
    return {
        "causal": torch.zeros(rows, columns).masked_fill_(is_later, -math.inf).expand(3, 1, rows, columns),
        "padding": padding,
        "left-padding": left_padding,
        "full-padding": full_padding,
        "bias": bias + padding,
        "random": torch.randn(3, 4, rows, columns).masked_fill_(torch.rand(3, 4, rows, columns) < 0.5, -math.inf),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "padding", "left-padding", "full-padding", "bias", "random", "bool", "bool-finite"]
)
def test_masked_attention_matches_autograd(name: str, dtype: torch.dtype) -> None:
    """The kernel skips columns hidden from a block of rows; fully masked rows have equal probabilities, as in eager."""
    assert compiled_kernels.LIBRARIES[dtype].wait()
    rows, columns, width = 70, 101, 24
    q, dy = heads(3, 4, rows, width, dtype), heads(3, 4, rows, width, dtype)
    k, v = heads(3, 4, columns, width, dtype), heads(3, 4, columns, width, dtype)
    fill = -1e4 if name == "bool-finite" else None
    if name.startswith("bool"):
        added = None
        mask = _masks(rows, columns)["causal"].clone() == 0
        mask[:, :, :, 90:] = False
    else:
        added = _masks(rows, columns)[name].to(dtype)
        mask = None

    def reference(wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        scores = leaves[0] @ leaves[1].mT / math.sqrt(width)
        if added is not None:
            scores = scores + added.to(wide)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf if fill is None else fill)
        y = torch.softmax(scores, -1) @ leaves[2]
        return [y, *torch.autograd.grad(y, leaves, dy.to(wide))]

    scores = ScoreOptions(None, added, mask, fill)
    y, _ = compiled_kernels.forward(q, k, v, scores) or pytest.fail("not compiled")
    results = [y, *(compiled_kernels.backward(dy, q, k, v, scores) or ())]
    for result, got, eager, exact in zip(
        ("y", "dq", "dk", "dv"), results, reference(dtype), reference(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(result, got, eager.detach(), exact.detach())


@pytest.mark.parametrize("mask", ["additive", "bool"])
def test_hidden_columns_are_not_read(mask: str) -> None:
    """NaN in these columns would spread, because 0 * NaN is NaN."""
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (heads(2, 2, 96, 16) for _ in range(3))
    visible = torch.ones(2, 1, 1, 96, dtype=torch.bool)
    visible[0, ..., 32:] = False
    v[0, :, 32:] = math.nan
    k[0, :, 32:] = math.nan
    additive = torch.zeros(2, 1, 1, 96).masked_fill_(~visible, torch.finfo().min)
    scores = ScoreOptions(None, additive) if mask == "additive" else ScoreOptions(None, None, visible)
    y, _ = compiled_kernels.forward(q, k, v, scores) or pytest.fail("not compiled")
    dq, dk, dv = compiled_kernels.backward(y, q, k, v, scores) or pytest.fail("not compiled")
    assert all(g.isfinite().all() for g in (y, dq, dk, dv))
    assert not dk[0, :, 32:].any()
    assert not dv[0, :, 32:].any()


def test_bfloat16_is_rounded_to_nearest(described_machine: Describe) -> None:
    """Truncation would pass the comparison with eager, whose bound is twice eager's error."""
    described_machine("avx2")
    assert compiled_kernels.LIBRARIES[torch.bfloat16].wait()
    q = torch.zeros(1, 2, 40, 16, dtype=torch.bfloat16)
    k, v = (heads(1, 2, 2, 16, torch.bfloat16) for _ in range(2))
    y, _ = compiled_kernels.forward(q, k, v, ScoreOptions()) or pytest.fail("not compiled")
    assert torch.equal(y, v.float().mean(2, keepdim=True).bfloat16().expand_as(y))


@pytest.mark.parametrize("fill", [None, torch.finfo().min])
def test_fully_masked_row_in_a_block_with_skipped_columns(fill: float | None) -> None:
    """Its probabilities are 0 for a fill of -inf, otherwise equal over all columns."""
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (heads(1, 2, 96, 16) for _ in range(3))
    visible = torch.ones(1, 1, 96, 96, dtype=torch.bool)
    visible[..., 16:] = False
    visible[..., 5, :] = False
    y, _ = compiled_kernels.forward(q, k, v, ScoreOptions(None, None, visible, fill)) or pytest.fail("not compiled")
    assert_matches(y[:, :, 5], lambda v: v.mean(2) if fill else torch.zeros_like(v[:, :, 0]), v)


def test_causally_masked_scores_have_no_gradient() -> None:
    """This includes columns that are hidden from a whole block of rows."""
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (heads(1, 2, 96, 16) for _ in range(3))
    bias = torch.zeros(1, 2, 96, 96)
    *_, dscores = compiled_kernels.backward(
        v, q, k, v, ScoreOptions(None, bias, causal=True), output_dscores=True
    ) or pytest.fail("none")
    assert dscores.tril().any()
    assert not dscores.triu(1).any()


def test_results_are_bitwise_equal_for_any_number_of_threads() -> None:
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (heads(5, 3, 77, 24) for _ in range(3))
    scores, dropout = ScoreOptions(causal=True), DropoutOptions(keyed_bits.sample_key(), 6554, 1.1)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        try:
            y, _ = compiled_kernels.forward(q, k, v, scores, dropout) or pytest.fail("not compiled")
            results.append((y, *(compiled_kernels.backward(y, q, k, v, scores, dropout) or ())))
        finally:
            torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nan_and_infinity_propagate() -> None:
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
    q[0, 0, 1, 2] = math.nan
    v[0, 0, 3, 5] = math.inf
    y, _ = compiled_kernels.forward(q, k, v, ScoreOptions()) or pytest.fail("not compiled")
    assert_matches(y, lambda q, k, v: torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v, q, k, v)


def test_only_the_library_of_the_graphs_type_is_requested(
    monkeypatch: pytest.MonkeyPatch, described_machine: Describe
) -> None:
    requested: list[str] = []
    monkeypatch.setattr(Library, "request", lambda library: requested.append(library.name))

    def request(dtype: ir.DataType) -> None:
        compiled_kernels.request(ir.Value(name="q", type=ir.TensorType(dtype)))

    request(ir.DataType.FLOAT16)
    assert requested == []
    request(ir.DataType.FLOAT)
    assert requested == ["attention-float"]
    described_machine("avx512-bf16")
    request(ir.DataType.BFLOAT16)
    assert requested == ["attention-float"]


def test_invalid_offsets_are_rejected() -> None:
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q = torch.randn(6, 2, 8)
    valid = torch.tensor([0, 2, 6])
    assert compiled_kernels.forward_varlen(q, q, q, PackedSequences(valid, valid)) is not None
    for invalid in ([0, 2, 7], [0, 4, 2], [-1, 2, 6]):
        assert compiled_kernels.forward_varlen(q, q, q, PackedSequences(torch.tensor(invalid), valid)) is None


def test_keys_of_a_sequence_without_queries_have_no_gradient() -> None:
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    q, k, v = (torch.randn(count, 3, 24) for count in (40, 77, 77))
    packed = PackedSequences(torch.tensor([0, 0, 40, 40]), torch.tensor([0, 4, 44, 77]))
    _, dk, dv = compiled_kernels.backward_varlen(q, q, k, v, packed) or pytest.fail("not compiled")
    for gradient in (dk, dv):
        assert gradient[4:44].abs().sum(-1).all()
        assert not gradient[:4].any()
        assert not gradient[44:].any()


@pytest.mark.parametrize("count", [0, 1, 3, 31, 32, 33, 1023, 1025, 262_144 + 5])
def test_compiled_and_aten_random_bits_are_equal(count: int) -> None:
    assert keyed_bits.LIBRARY.wait()
    key = keyed_bits.sample_key()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(count).to(dtype)
        assert torch.equal(keyed_bits.drop_compiled(x, key, 6554, 1.109375), keyed_bits.drop(x, key, 6554, 1.109375))
    assert torch.equal(keyed_bits.keep_mask_compiled(key, count, 6554), keyed_bits.keep_mask(key, count, 6554))
    strided = torch.randn(count, 2)[:, 0]
    assert torch.equal(keyed_bits.drop_compiled(strided, key, 6554, 1.1), keyed_bits.drop(strided, key, 6554, 1.1))


@pytest.mark.parametrize("count", [0, 1, 33, 1025, 262_144 + 5])
def test_compiled_and_aten_dropout_add_the_residual_and_write_in_place(count: int) -> None:
    """With integers nothing is rounded, in one step or in two."""
    assert keyed_bits.LIBRARY.wait()
    key = keyed_bits.sample_key()
    x, residual = torch.randint(-40, 40, (2, count))
    dropped = 1.5 * x * (cases_keyed_dropout.keyed_samples(key, count) >= 6554 - 2**15)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        dense = residual.to(dtype)
        for added in (None, dense, torch.stack([dense, dense], 1)[:, 0]):
            expected = (dropped if added is None else dropped + residual).to(dtype)
            kernels = (keyed_bits.drop, keyed_bits.drop_), (keyed_bits.drop_compiled, keyed_bits.drop_compiled_)
            for out_of_place, in_place in kernels:
                tensor = x.to(dtype)
                assert torch.equal(out_of_place(tensor, key, 6554, 1.5, added), expected)
                assert torch.equal(tensor, x.to(dtype))
                assert in_place(tensor, key, 6554, 1.5, added) is tensor
                assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_causal_mask_becomes_a_flag(dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The causal mask that PyTorch builds for dropout is recognized, so the kernel skips columns and reads no mask."""
    assert compiled_kernels.LIBRARIES[torch.float32].wait()
    options: list[ScoreOptions] = []
    for direction in ("forward", "backward"):
        original = getattr(compiled_kernels, direction)

        def recorded(*arguments: Any, original: Any = original, **keywords: Any) -> Any:
            options.extend(a for a in arguments if isinstance(a, ScoreOptions))
            return original(*arguments, **keywords)

        monkeypatch.setattr(compiled_kernels, direction, recorded)
    module = FunctionModule(
        lambda q, k, v: (torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True),)
    )
    ours = ORTModule(module, rng="fast")
    for length in (7, 40):
        q, k, v = (torch.randn(2, 2, length, 8, requires_grad=True) for _ in range(3))
        (y,) = ours(q, k, v)
        y.sum().backward()
        later = torch.autograd.grad(ours(q, k, v)[0][:, :, 0].sum(), v)[0][:, :, 1:]
        assert not later.any()
    assert len(options) == 8
    assert all(m.causal and m.mask is None and m.bias is None for m in options)


def test_causal_masks_are_recognized() -> None:
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 23}, name="masks")
    op = builder(graph)
    visible = np.tril(np.ones((5, 5), bool))
    additive = np.where(visible, 0.0, -np.inf)
    causal = [op.constant(visible, ir.DataType.BOOL), op.constant(additive[None, None], ir.DataType.FLOAT)]
    q = op.constant(np.ones((1, 1, 5, 4)), ir.DataType.FLOAT)
    others = [np.tril(visible, -1), ~visible, np.ones((5, 5), bool), np.stack([visible, visible])]
    not_causal = [op.constant(x, ir.DataType.BOOL) for x in others]
    other_values = [
        np.where(visible, 1.0, -np.inf),
        np.where(visible, 0.0, -1e4),
        np.where(visible, 0.0, np.finfo(np.float32).min),
    ]
    not_causal += [op.constant(x, ir.DataType.FLOAT) for x in other_values]
    not_causal += [op.Trilu(op.constant(others[2], ir.DataType.BOOL), upper=1)]
    expected = [True] * len(causal) + [False] * len(not_causal)
    assert [is_causal_mask(m, q, q) for m in (*causal, *not_causal)] == expected
    six_keys = op.constant(np.ones((1, 1, 6, 4)), ir.DataType.FLOAT)
    wide = causal_mask(op, 5, 6, ir.DataType.FLOAT)
    assert is_causal_mask(wide, q, six_keys)
    assert not is_causal_mask(wide, six_keys, six_keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("both", [False, True], ids=("one", "both"))
@pytest.mark.parametrize(
    ("steps", "samples", "hidden", "bias"), [(7, 3, 16, True), (1, 1, 33, True), (5, 9, 40, False), (12, 8, 70, True)]
)
def test_lstm_matches_autograd(
    steps: int, samples: int, hidden: int, bias: bool, both: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(compiled_lstm.LIBRARY, "functions", counting(compiled_lstm.LIBRARY, counts))
    count, width = 1 + both, 11
    shapes = [(4 * hidden, width), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)][: 4 if bias else 2]
    weights = [torch.randn(shape).to(dtype) / math.sqrt(hidden) for _ in range(count) for shape in shapes]
    x = torch.randn(steps, samples, width).to(dtype)
    h0, c0 = (torch.randn(count, samples, hidden).to(dtype) for _ in range(2))
    cotangents = [torch.randn(steps, samples, count * hidden).to(dtype), *(torch.randn_like(h0) for _ in range(2))]

    def eager(wide: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(wide).requires_grad_() for t in (x, h0, c0, *weights)]
        results = torch.lstm(leaves[0], leaves[1:3], leaves[3:], bias, 1, 0.0, True, both, False)
        gradients = torch.autograd.grad(results, leaves, [c.to(wide) for c in cotangents])
        return [*(r.detach() for r in results), *gradients]

    every = [w for d in range(count) for w in (*weights[d * len(shapes) : (d + 1) * len(shapes)], None, None)[:4]]
    y, h, c, *kept = layer_kernels.layer(LSTM, False, True, True, x, h0, c0, *every)
    requested = (True, True)
    back = layer_kernels.layer_backward(LSTM, False, requested, True, *cotangents, x, h0, c0, every, y, c, *kept)
    names = ("y", "h", "c", "dx", "dh", "dc", *(f"weight {i}" for i in range(len(weights))))
    for label, got, theirs, exact in zip(names, (y, h, c, *back), eager(dtype), eager(torch.float64), strict=True):
        assert_no_worse_than_eager(label, got, theirs, exact)
    name = "float" if dtype == torch.float32 else "double"
    assert counts == {f"forward_{name}": count, f"backward_{name}": count}


def test_lstm_of_large_values_and_nan() -> None:
    assert compiled_lstm.LIBRARY.wait()
    torch.manual_seed(0)
    layer = torch.nn.LSTM(8, 32)
    x = torch.randn(4, 6, 8)
    x[0, 1] = 1e30
    x[1, 2] = -1e30
    x[2, 3] = math.nan
    x[0, 4] = math.inf
    h0 = torch.zeros(1, 6, 32)
    weights = [p.detach() for p in layer.parameters()]
    y, *_ = layer_kernels.layer(LSTM, False, True, True, x, h0, h0, *weights)
    first, wide = h0.double(), [w.double() for w in weights]
    expected, *_ = torch.lstm(x.double(), (first, first), wide, True, 1, 0.0, True, False, False)
    eager, *_ = torch.lstm(x, (h0, h0), weights, True, 1, 0.0, True, False, False)
    assert_no_worse_than_eager("y", y, eager, expected)


def test_lstm_module_runs_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    monkeypatch.setattr(compiled_lstm.LIBRARY, "functions", counting(compiled_lstm.LIBRARY, counts))
    for threads in (1, 2, 5):
        count = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            ORTModule(torch.nn.LSTM(8, 80))(torch.randn(5, 3, 8))[0].square().sum().backward()
        finally:
            torch.set_num_threads(count)
    assert counts == {"forward_float": 3, "backward_float": 3}


@on_other_processors
def test_other_vector_lengths(processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernels compiled for processors without AVX-512 and without AVX: the same masks and gradients."""
    others = (activations.LIBRARY, rms_norm_kernels.LIBRARY, compiled_lstm.LIBRARY)
    for library in (*compiled_kernels.LIBRARIES.values(), keyed_bits.LIBRARY, cross_entropy.LIBRARY, *others):
        assert library.wait()
        monkeypatch.setattr(library, "functions", compiled_for(processor, library, monkeypatch, tmp_path).functions)
    for dtype in (torch.float32, torch.float64):
        test_attention_with_dropout_matches_autograd_with_the_same_mask((33, 70), (64, 48), 2, True, dtype)
        test_masked_attention_matches_autograd("left-padding", dtype)
        test_tanh_gelu_matches_autograd((5, 7, 471), dtype, monkeypatch)
        for activation in activations.COMPILED_GATES:
            test_gated_activation_matches_autograd((5, 7, 471), "slice", activation, dtype, monkeypatch)
        test_rms_norm_matches_autograd((3, 17, 1001), 2, True, True, dtype, monkeypatch)
        test_lstm_matches_autograd(5, 9, 40, True, True, dtype, monkeypatch)
    for count in (3, 1025, 262_149):
        test_compiled_and_aten_random_bits_are_equal(count)
        test_compiled_and_aten_dropout_add_the_residual_and_write_in_place(count)
    test_nan_and_infinity_propagate()
