"""Packed attention on a GPU: the calls' signatures on meta tensors, and results if there is a device."""

from __future__ import annotations

import functools
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.attention import varlen_flash
from onnxtrain.ops.attention.kernel_arguments import PackedSequences
from onnxtrain.ops.attention.varlen_aten import varlen_attention, varlen_attention_backward
from onnxtrain.testing import assert_no_worse_than_eager

LENGTHS = [5, 1, 0, 7]
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def heads(count: int, tokens: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Return [t, h, e], a slice of a joint projection to q, k and v, as models compute it."""
    return torch.randn(tokens, 3, count, 16, device=device, dtype=dtype)[:, 1]


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_arguments_match_the_signatures_of_pytorchs_kernels(ratio: float) -> None:
    q, k, v = (heads(count, 15, "meta", torch.bfloat16) for count in (4, 2, 2))
    packed = PackedSequences(CU.to("meta"), CU.to("meta"), causal=True)
    y, logsumexp, state = varlen_flash.varlen_dropout_flash(q, k, v, packed, ratio)
    assert (y.shape, y.dtype) == (q.shape, q.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == ((4, 15), torch.float32)
    assert (state.shape, state.dtype) == ((2,), torch.int64)
    gradients = varlen_flash.varlen_backward_flash(
        torch.empty_like(y), q, k, v, packed, y, logsumexp, state if ratio else None, ratio
    )
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]


def test_tokens_outside_all_sequences_are_zero() -> None:
    x = torch.full((6, 2, 3), torch.nan)
    result = varlen_flash._zero_outside(x, torch.tensor([1, 3, 4]))
    assert [bool(row.isnan().any()) for row in result] == [False, True, True, True, False, False]
    assert not result.nan_to_num().any()


def values(dtype: ir.DataType, width: int) -> list[ir.Value]:
    """Return q, k, v and two vectors of offsets."""
    types = [TensorType(dtype, ("t", 2, width))] * 3 + [TensorType(ir.DataType.INT64, ("n",))] * 2
    operands = [ir.Value(name=f"x{i}") for i in range(len(types))]
    for value, tensor_type in zip(operands, types, strict=True):
        set_type(value, tensor_type)
    return operands


@pytest.mark.parametrize(
    ("change", "supported"),
    [
        ({}, True),
        ({"width": 12}, False),
        ({"width": 264}, False),
        ({"dtype": ir.DataType.FLOAT}, False),
        ({"device": "cpu"}, False),
    ],
)
def test_flash_runs(change: dict[str, object], supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    options: dict[str, Any] = {"width": 16, "dtype": ir.DataType.BFLOAT16, "device": "cuda", **change}
    q, k, v, *_ = values(options["dtype"], options["width"])
    assert varlen_flash.flash_runs(options["device"], q, k, v) == supported


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("causal", "cross", "chosen"),
    [(False, False, True), (True, False, True), (False, True, True), (True, True, False)],
)
def test_forward_and_backward_choose_the_same_kernel(
    causal: bool, cross: bool, chosen: bool, dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel aligns its causal mask with the last row and column, so it does not run with other lengths of keys."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    q, k, v, cu_seqlens_q, cu_seqlens_k = inputs = values(ir.DataType.BFLOAT16, 16)
    op = builder(ir.Graph(inputs, [], nodes=[], opset_imports={"": 23}, name="attention"))
    operands = [q, k, v, cu_seqlens_q, cu_seqlens_k if cross else cu_seqlens_q]
    state, ratio = None, op.scalar(0.1, ir.DataType.DOUBLE)
    attributes = {"is_causal": int(causal) or None}
    if dropout:
        training = op.scalar(True, ir.DataType.BOOL)
        y, logsumexp, state = op.own.VarlenFlashAttentionDropout(*operands, ratio, training, **attributes)
    else:
        y, logsumexp = op.own.VarlenFlashAttention(*operands, **attributes)
    dq, *_ = op.own.VarlenFlashAttentionGrad(y, *operands, y, logsumexp, state, state and ratio, **attributes)
    for node in (y.producer(), dq.producer()):
        kernel = definition_of(node).kernel(node, "cuda")
        assert (kernel is definition_of(node).kernels[0]) == chosen
        assert definition_of(node).kernel(node, "cpu") is definition_of(node).kernels[1]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_flash_is_as_accurate_as_the_loop_over_sequences(causal: bool) -> None:
    q, k, v = (heads(count, 15, "cuda", torch.float16) for count in (4, 2, 2))
    packed, dy = PackedSequences(CU.cuda(), CU.cuda(), causal=causal), heads(4, 15, "cuda", torch.float16)
    y, logsumexp = varlen_flash.varlen_flash(q, k, v, packed)
    results = y, *varlen_flash.varlen_backward_flash(dy, q, k, v, packed, y, logsumexp, None, 0.0)

    def loop(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        cast = functools.partial(torch.Tensor.to, dtype=dtype)
        operands = [*map(cast, (q, k, v)), packed]
        return varlen_attention(*operands), *varlen_attention_backward(cast(dy), *operands, False)

    for name, got, eager, exact in zip(
        ("y", "dq", "dk", "dv"), results, loop(torch.float16), loop(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, eager, exact)
