"""Attention by PyTorch's kernels for a GPU: the calls' signatures on meta tensors, the formula beside them, capture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import onnx_ir as ir
import pytest
import torch
from torch.nn.attention import SDPBackend

from onnxtrain import ORTModule
from onnxtrain.execute.boundary import RandomState, backward_context
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.attention import gpu_kernels
from onnxtrain.ops.attention.flash_formula import formula, formula_backward
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.registry import FROM_TORCH
from onnxtrain.testing import assert_no_worse_than_eager
from onnxtrain.torch_compat import aten_kernels, attention_switches

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def choose(monkeypatch: pytest.MonkeyPatch, backend: SDPBackend) -> None:
    """PyTorch names this kernel, which shares no heads if it is the memory-efficient one."""

    def choice(*arguments: Any, enable_gqa: bool, **options: Any) -> int:
        alone = enable_gqa and backend == SDPBackend.EFFICIENT_ATTENTION
        return int((SDPBackend.MATH if alone else backend).value)

    monkeypatch.setattr(aten_kernels.SDP_CHOICE, "get", lambda: choice)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "width"), [(7, 16), (32, 12)])
@pytest.mark.parametrize("masked", [False, True])
def test_arguments_match_the_signatures_of_pytorchs_kernels(
    backend: SDPBackend, ratio: float, rows: int, width: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if masked and backend == SDPBackend.FLASH_ATTENTION:
        pytest.skip("flash attention takes no mask")
    choose(monkeypatch, backend)
    q = torch.empty(2, 4, rows, width, device="meta", dtype=torch.bfloat16)
    shared = 4 if ratio and backend == SDPBackend.EFFICIENT_ATTENTION else 2  # eager's kernel shares no heads
    k, v = (torch.empty(2, shared, 9, width, device="meta", dtype=torch.bfloat16) for _ in range(2))
    mask = torch.empty(2, 1, rows, 9, device="meta", dtype=torch.bfloat16) if masked else None
    options = ScoreOptions(mask=mask)
    y, logsumexp, state = gpu_kernels.attention(q, k, v, options, ratio)
    assert (y.shape, y.dtype) == (q.shape, q.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == (q.shape[:3], torch.float32)
    assert (state is None) == (not ratio)
    if state is not None:
        assert (state.shape, state.dtype) == ((2,), torch.int64)
    gradients = gpu_kernels.attention_backward(torch.empty_like(y), q, k, v, y, logsumexp, state, options, ratio)
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_formula_is_as_accurate_as_pytorchs(causal: bool, masked: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q, dy = (torch.randn(2, 4, 7, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(2))
    mask = torch.randn(2, 1, 7, 9, generator=generator) if masked else None
    options = ScoreOptions(0.3, mask=mask, causal=causal)
    y, _ = formula(q, k, v, options)
    results = y, *formula_backward(dy, q, k, v, options)

    def eager(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        bias = torch.zeros(7, 9, dtype=dtype) if mask is None else mask.to(dtype)
        if causal:
            bias = bias.masked_fill(torch.ones(7, 9, dtype=torch.bool).triu(1), -math.inf)
        output = torch.nn.functional.scaled_dot_product_attention(*leaves, bias, scale=0.3, enable_gqa=True)
        return output.detach(), *torch.autograd.grad(output, leaves, dy.to(dtype))

    for name, got, theirs, exact in zip(
        ("y", "dq", "dk", "dv"), results, eager(torch.float32), eager(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, theirs, exact)


@pytest.mark.parametrize("backend", BACKENDS[:2], ids=lambda backend: backend.name)
def test_backward_of_a_dense_batch_has_no_offsets(backend: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes any defined tensor of offsets for a packed batch, and raises an error on a GPU."""
    choose(monkeypatch, backend)
    entry = aten_kernels.gpu_flash_grad if backend == SDPBackend.FLASH_ATTENTION else aten_kernels.gpu_cudnn_grad
    kernel, calls = entry.get(), list[dict[str, Any]]()

    def recorded(*arguments: Any, **options: Any) -> Any:
        names = [argument.name for argument in kernel._schema.arguments]
        calls.append(dict(zip(names, arguments, strict=False)))
        return kernel(*arguments, **options)

    monkeypatch.setattr(entry, "get", lambda: recorded)
    q = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    y, logsumexp, state = gpu_kernels.attention(q, q, q, ScoreOptions())
    gpu_kernels.attention_backward(y, q, q, q, y, logsumexp, state, ScoreOptions())
    assert [(call["cum_seq_q"], call["cum_seq_k"]) for call in calls] == [(None, None)]


def test_backward_chooses_among_forwards_kernels() -> None:
    unit = SimpleNamespace(device_type="cuda")
    before = attention_switches.enabled_kernels()
    with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
        forward = attention_switches.enabled_kernels()
    assert forward == (SDPBackend.MATH,)
    state = RandomState(torch.empty(0), [(torch.device("cuda"), torch.empty(0))], forward)
    with backward_context(cast("Any", unit), state):
        assert attention_switches.enabled_kernels() == forward
    assert attention_switches.enabled_kernels() == before


@pytest.mark.parametrize("ratio", [0.25])
def test_backward_drops_the_same_elements_as_forward(ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the formula, by the CPU's generator in the place of the GPU's; other dropouts sample in between."""
    choose(monkeypatch, SDPBackend.MATH)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda state, device: torch.set_rng_state(state))
    q, k, v, dy = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(4))
    torch.manual_seed(5)
    y, logsumexp, state = gpu_kernels.attention(q, k, v, ScoreOptions(), ratio)
    sampled = torch.get_rng_state()
    torch.rand(7)
    results = y, *gpu_kernels.attention_backward(dy, q, k, v, y, logsumexp, state, ScoreOptions(), ratio)
    torch.manual_seed(5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    p = torch.native_dropout((leaves[0] @ leaves[1].mT / 2).softmax(-1), ratio, True)[0]
    assert torch.equal(torch.get_rng_state(), sampled)
    for got, expected in zip(results, (p @ leaves[2], *torch.autograd.grad(p @ leaves[2], leaves, dy)), strict=True):
        assert_no_worse_than_eager("result", got, expected.detach(), expected.detach())


@pytest.mark.parametrize("shape", [(7, 9), (7, 1), (2, 1, 1, 9), (2, 1, 7, 16), (1, 4, 7, 9), (2, 4, 1, 1)])
def test_masks_are_aligned_as_the_kernel_requires(shape: tuple[int, ...]) -> None:
    """Memory-efficient attention refuses strides that are not a multiple of 4 elements, for axes longer than 1."""
    q, mask = torch.empty(2, 4, 7, 8), torch.randn(shape).mT.contiguous().mT
    aligned = gpu_kernels._aligned_mask(mask, q, torch.empty(2, 4, mask.size(-1), 8))
    assert aligned is not None
    assert torch.equal(aligned, mask.expand(2, 4, 7, mask.size(-1)))
    assert aligned.stride(-1) == 1
    assert not any(stride % 16 for stride in aligned.stride()[:-1])


def captured(device: str, dropout: float, mask: Callable[[Any], ir.Value] | None = None) -> list[str]:
    """Return the ops that F.scaled_dot_product_attention becomes on a device."""
    inputs = [ir.Value(name=f"x{i}") for i in range(3)]
    for value in inputs:
        set_type(value, TensorType(ir.DataType.FLOAT16, (2, 4, 5, 16)))
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": 23}, name="attention"))
    op.device = device
    mask_value = None if mask is None else mask(op)
    FROM_TORCH["aten.scaled_dot_product_attention.default"](op, *inputs, mask_value, dropout)
    return [node.op_type for node in op.graph]


def test_switched_off_flash_attention_leaves_the_other_kernels_of_a_gpu() -> None:
    with torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert captured("cuda", 0.1) == ["FlashAttentionDropout"]
        assert "FlashAttention" not in captured("cpu", 0.0)


def test_dropout_is_captured_as_a_kernel_on_a_gpu_and_as_the_math_path_on_a_cpu() -> None:
    assert captured("cuda", 0.1) == ["FlashAttentionDropout"]
    assert "Dropout" in captured("cpu", 0.1)
    assert captured("cuda", 0.0) == ["FlashAttention"]


def test_a_mask_that_may_be_learned_keeps_the_math_path() -> None:
    """The gradient of FlashAttentionDropout in its mask would need the generator's dropout mask."""

    def learned(op: Any) -> ir.Value:
        bias = ir.Value(name="bias")
        set_type(bias, TensorType(ir.DataType.FLOAT16, (5, 5)))
        op.graph.inputs.append(bias)
        return op.Mul(bias, op.scalar(2.0, ir.DataType.FLOAT16))

    assert "FlashAttentionDropout" not in captured("cuda", 0.1, learned)


@pytest.mark.parametrize("dropout", [False, True])
def test_forward_and_backward_choose_the_same_kernel(dropout: bool) -> None:
    inputs = [ir.Value(name=f"x{i}") for i in range(3)]
    for value in inputs:
        set_type(value, TensorType(ir.DataType.FLOAT16, (2, 4, 5, 16)))
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": 23}, name="attention"))
    ratio, training = op.scalar(0.1, ir.DataType.DOUBLE), op.scalar(True, ir.DataType.BOOL)
    if dropout:
        y, logsumexp, state = op.own.FlashAttentionDropout(*inputs, None, ratio, training)
        dq, *_ = op.own.FlashAttentionGrad(y, *inputs, None, y, logsumexp, state, ratio)
    else:
        y, logsumexp = op.own.FlashAttention(*inputs, None)
        dq, *_ = op.own.FlashAttentionGrad(y, *inputs, None, y, logsumexp)
    for value in (y, dq):
        definition = definition_of(value.producer())
        assert definition.kernel(value.producer(), "cuda") is definition.kernels[0]
        assert definition.kernel(value.producer(), "cpu") is not definition.kernels[0]


# On a GPU


def compared_with_eager(
    backend: SDPBackend,
    dtype: torch.dtype,
    ratio: float,
    heads: tuple[int, int] = (4, 4),
    mask: torch.Tensor | None = None,
    causal: bool = False,
    width: int = 16,
) -> None:
    """The same seed gives eager's dropout mask: y and the gradients equal eager's, by kernels bit for bit."""
    q = torch.randn(2, heads[0], 40, width, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, heads[1], 40, width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
    dy = torch.randn_like(q)
    options = ScoreOptions(mask=mask, causal=causal)
    with torch.nn.attention.sdpa_kernel(backend):
        torch.manual_seed(7)
        eager = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, ratio, causal, enable_gqa=heads[0] != heads[1]
        )
        expected = eager, *torch.autograd.grad(eager, (q, k, v), dy)
        state_after = torch.cuda.get_rng_state()
        torch.manual_seed(7)
        with torch.no_grad():
            y, logsumexp, state = gpu_kernels.attention(q, k, v, options, ratio)
            assert torch.equal(torch.cuda.get_rng_state(), state_after)
            results = y, *gpu_kernels.attention_backward(dy, q, k, v, y, logsumexp, state, options, ratio)
    for got, theirs in zip(results, expected, strict=True):
        if backend == SDPBackend.MATH:
            assert_no_worse_than_eager("result", got, theirs.detach(), theirs.detach().double())
        else:
            torch.testing.assert_close(got, theirs, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [16, 20])
def test_kernels_equal_eager(backend: SDPBackend, ratio: float, causal: bool, width: int) -> None:
    if backend != SDPBackend.FLASH_ATTENTION and width % 8:
        pytest.skip("PyTorch pads heads for flash attention only")
    compared_with_eager(backend, torch.float16, ratio, causal=causal, width=width)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], ids=lambda b: b.name)
@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40, 40), (2, 1, 1, 40), (2, 4, 40, 40)])
def test_kernels_with_masks_equal_eager(backend: SDPBackend, ratio: float, shape: tuple[int, ...]) -> None:
    compared_with_eager(backend, torch.float16, ratio, mask=torch.randn(shape, device="cuda", dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_math_path_drops_the_same_elements_as_eager(dtype: torch.dtype, heads: tuple[int, int]) -> None:
    compared_with_eager(SDPBackend.MATH, dtype, 0.1, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [*BACKENDS, SDPBackend.MATH], ids=lambda backend: backend.name)
def test_backward_runs_the_kernel_of_forward(backend: SDPBackend) -> None:
    """Kernels are selected around forward only: another kernel would read the state of its dropout differently."""
    module = _Attention().cuda().half()
    x = torch.randn(2, 4, 40, 16, device="cuda", dtype=torch.float16)
    gradients = []
    for run in (module, ORTModule(copy.deepcopy(module), rng="torch", fallback_policy="FALLBACK_DISABLE")):
        torch.manual_seed(7)
        with torch.nn.attention.sdpa_kernel(backend):
            y = run(x)
        y.square().sum().backward()
        gradients.append([p.grad for p in run.parameters()])
    for theirs, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, theirs)


class _Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x * self.scale, x, x * self.scale, dropout_p=0.5)
