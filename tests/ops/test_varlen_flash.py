"""Packed attention on a GPU: the calls by their signatures on meta tensors, the numbers where there is a device."""

from __future__ import annotations

import functools

import onnx_ir as ir
import pytest
import torch

from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder, definition_of
from onnxtrain.ops.attention import varlen, varlen_flash
from onnxtrain.ops.attention.kernel_arguments import PackedSequences
from onnxtrain.ops.attention.varlen_aten import varlen_attention, varlen_attention_backward
from onnxtrain.testing import assert_no_worse_than_eager

LENGTHS = [5, 1, 0, 7]
CU = torch.tensor([0, *LENGTHS]).cumsum(0)


def heads(count: int, tokens: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """[t, h, e] as models cut it from a projection of q, k and v together."""
    return torch.randn(tokens, 3, count, 16, device=device, dtype=dtype)[:, 1]


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_pytorchs_kernels_take_these_arguments(ratio: float) -> None:
    q, k, v = (heads(count, 15, "meta", torch.bfloat16) for count in (4, 2, 2))
    packed = PackedSequences(CU.to("meta"), CU.to("meta"), causal=True)
    y, logsumexp, state = varlen_flash.varlen_dropout_flash(q, k, v, packed, ratio)
    assert (y.shape, y.dtype) == (q.shape, q.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == ((4 * 15,), torch.float32)
    found = varlen_flash.varlen_backward_flash(
        torch.empty_like(y), q, k, v, packed, y, logsumexp, state if ratio else None, ratio
    )
    assert [g.shape for g in found] == [x.shape for x in (q, k, v)]


def test_tokens_of_no_sequence_are_zero() -> None:
    x = torch.full((6, 2, 3), torch.nan)
    found = varlen_flash._zero_outside(x, torch.tensor([1, 3, 4]))
    assert [bool(row.isnan().any()) for row in found] == [False, True, True, True, False, False]
    assert not found.nan_to_num().any()


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, True),
        ({"causal": 1}, True),
        ({"causal": 1, "cross": True}, False),  # the kernel counts from the last row and column
        ({"cross": True}, True),
        ({"biased": True}, False),
        ({"width": 12}, False),
        ({"width": 264}, False),
        ({"dtype": ir.DataType.FLOAT}, False),
        ({"device": "cpu"}, False),
        ({"draws": "any"}, True),
        ({"draws": "eager's"}, False),
    ],
)
def test_which_nodes_it_runs(change: dict[str, object], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    asked = {"causal": None, "cross": False, "biased": False, "width": 16, "dtype": ir.DataType.BFLOAT16, **change}
    types = [TensorType(asked["dtype"], ("t", 2, asked["width"]))] * 3
    types += [TensorType(ir.DataType.INT64, ("n",))] * 2 + [TensorType(asked["dtype"], (2, "l", "s"))]
    values = [ir.Value(name=f"x{i}") for i in range(len(types))]
    for value, kind in zip(values, types, strict=True):
        set_type(value, kind)
    q, k, v, cu_q, cu_k, bias = values
    op = builder(ir.Graph(values, [], nodes=[], opset_imports={"": 23}, name="attention"))
    if not asked["cross"]:
        cu_k = cu_q
    operands, device = [q, k, v, cu_q, cu_k, bias if asked["biased"] else None], str(asked.get("device", "cuda"))
    noise, ratio = None, op.scalar(0.1, ir.DataType.DOUBLE)
    if "draws" in asked:
        y, kept, noise = op.own.VarlenAttentionDropout(*operands, ratio, op.scalar(True, ir.DataType.BOOL))
        y.producer().metadata_props["draws"] = str(asked["draws"])
    else:
        y, kept = op.own.VarlenAttention(*operands, is_causal=asked["causal"])
    kernel = definition_of(y.producer()).kernel(y.producer(), device)
    assert (kernel.lower in (varlen._lower_flash, varlen._lower_dropout_flash)) == chosen
    dq = op.own.VarlenAttentionGrad(y, *operands, y, kept, noise, noise and ratio, is_causal=asked["causal"])[0]
    kernel = definition_of(dq.producer()).kernel(dq.producer(), device)
    assert (kernel.lower is varlen._lower_grad_flash) == chosen, "backward reads what forward's kernel kept"


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_no_further_off_than_the_formula(causal: bool) -> None:
    q, k, v = (heads(count, 15, "cuda", torch.float16) for count in (4, 2, 2))
    packed, dy = PackedSequences(CU.cuda(), CU.cuda(), causal=causal), heads(4, 15, "cuda", torch.float16)
    y, logsumexp = varlen_flash.varlen_flash(q, k, v, packed)
    found = y, *varlen_flash.varlen_backward_flash(dy, q, k, v, packed, y, logsumexp, None, 0.0)

    def formula(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        cast = functools.partial(torch.Tensor.to, dtype=dtype)
        operands = [*map(cast, (q, k, v)), packed]
        y, kept = varlen_attention(*operands)
        return y, *varlen_attention_backward(cast(dy), *operands, kept, False, None, 1.0)

    for name, got, eager, exact in zip(
        ("y", "dq", "dk", "dv"), found, formula(torch.float16), formula(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, eager, exact)
