"""Attention by PyTorch's kernels for a GPU: the calls' signatures on meta tensors, the formula beside them, capture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch.nn.attention import SDPBackend

from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.attention import gpu_kernels
from onnxtrain.ops.attention.flash_formula import formula, formula_backward
from onnxtrain.ops.attention.kernel_arguments import ScoreOptions
from onnxtrain.ops.registry import FROM_TORCH
from onnxtrain.testing import assert_no_worse_than_eager
from onnxtrain.torch_compat import aten_kernels

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
    k, v = (torch.empty(2, 2, 9, width, device="meta", dtype=torch.bfloat16) for _ in range(2))
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
    results = y, *formula_backward(dy, q, k, v, y, options)

    def eager(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        bias = torch.zeros(7, 9, dtype=dtype) if mask is None else mask.to(dtype)
        if causal:
            bias = bias.masked_fill(torch.ones(7, 9, dtype=torch.bool).triu(1), -math.inf)
        found = torch.nn.functional.scaled_dot_product_attention(*leaves, bias, scale=0.3, enable_gqa=True)
        return found.detach(), *torch.autograd.grad(found, leaves, dy.to(dtype))

    for name, got, theirs, exact in zip(
        ("y", "dq", "dk", "dv"), results, eager(torch.float32), eager(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, theirs, exact)


def captured(device: str, dropout: float, mask: Callable[[Any], ir.Value] | None = None) -> list[str]:
    """Return the ops that F.scaled_dot_product_attention becomes on a device."""
    inputs = [ir.Value(name=f"x{i}") for i in range(3)]
    for value in inputs:
        set_type(value, TensorType(ir.DataType.FLOAT16, (2, 4, 5, 16)))
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": 23}, name="attention"))
    op.device = device
    made = None if mask is None else mask(op)
    FROM_TORCH["aten.scaled_dot_product_attention.default"](op, *inputs, made, dropout)
    return [node.op_type for node in op.graph]


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


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_kernels_equal_eager(backend: SDPBackend, ratio: float) -> None:
    """The same seed gives eager's dropout mask, whose gradients are the same then."""
    q, k, v = (torch.randn(2, 4, 40, 16, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3))
    dy = torch.randn(2, 4, 40, 16, device="cuda", dtype=torch.float16)
    with torch.nn.attention.sdpa_kernel(backend):
        torch.manual_seed(7)
        eager = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=ratio)
        expected = eager, *torch.autograd.grad(eager, (q, k, v), dy)
        torch.manual_seed(7)
        with torch.no_grad():
            y, logsumexp, state = gpu_kernels.attention(q, k, v, ScoreOptions(), ratio)
            found = y, *gpu_kernels.attention_backward(dy, q, k, v, y, logsumexp, state, ScoreOptions(), ratio)
    for got, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(got, theirs, rtol=0, atol=0)
