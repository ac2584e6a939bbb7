"""Packed attention on a GPU: the calls' signatures on meta tensors, and results if there is a device."""

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
    """Return [t, h, e], a slice of a joint projection to q, k and v, as models compute it."""
    return torch.randn(tokens, 3, count, 16, device=device, dtype=dtype)[:, 1]


@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_arguments_match_the_signatures_of_pytorchs_kernels(ratio: float) -> None:
    q, k, v = (heads(count, 15, "meta", torch.bfloat16) for count in (4, 2, 2))
    packed = PackedSequences(CU.to("meta"), CU.to("meta"), causal=True)
    y, logsumexp, state = varlen_flash.varlen_dropout_flash(q, k, v, packed, ratio)
    assert (y.shape, y.dtype) == (q.shape, q.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == ((4 * 15,), torch.float32)
    gradients = varlen_flash.varlen_backward_flash(
        torch.empty_like(y), q, k, v, packed, y, logsumexp, state if ratio else None, ratio
    )
    assert [g.shape for g in gradients] == [x.shape for x in (q, k, v)]


def test_tokens_outside_all_sequences_are_zero() -> None:
    x = torch.full((6, 2, 3), torch.nan)
    result = varlen_flash._zero_outside(x, torch.tensor([1, 3, 4]))
    assert [bool(row.isnan().any()) for row in result] == [False, True, True, True, False, False]
    assert not result.nan_to_num().any()


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, True),
        ({"causal": 1}, True),
        ({"causal": 1, "cross": True}, False),  # the kernel aligns its causal mask with the last row and column
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
def test_flash_is_chosen(change: dict[str, object], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    options = {"causal": None, "cross": False, "biased": False, "width": 16, "dtype": ir.DataType.BFLOAT16, **change}
    types = [TensorType(options["dtype"], ("t", 2, options["width"]))] * 3
    types += [TensorType(ir.DataType.INT64, ("n",))] * 2 + [TensorType(options["dtype"], (2, "l", "s"))]
    values = [ir.Value(name=f"x{i}") for i in range(len(types))]
    for value, tensor_type in zip(values, types, strict=True):
        set_type(value, tensor_type)
    q, k, v, cu_seqlens_q, cu_seqlens_k, bias = values
    op = builder(ir.Graph(values, [], nodes=[], opset_imports={"": 23}, name="attention"))
    if not options["cross"]:
        cu_seqlens_k = cu_seqlens_q
    operands, device = (
        [q, k, v, cu_seqlens_q, cu_seqlens_k, bias if options["biased"] else None],
        str(options.get("device", "cuda")),
    )
    dropout_mask, ratio = None, op.scalar(0.1, ir.DataType.DOUBLE)
    if "draws" in options:
        y, saved, dropout_mask = op.own.VarlenAttentionDropout(*operands, ratio, op.scalar(True, ir.DataType.BOOL))
        y.producer().metadata_props["draws"] = str(options["draws"])
    else:
        y, saved = op.own.VarlenAttention(*operands, is_causal=options["causal"])
    kernel = definition_of(y.producer()).kernel(y.producer(), device)
    assert (kernel.lower in (varlen._lower_flash, varlen._lower_dropout_flash)) == chosen
    dq = op.own.VarlenAttentionGrad(
        y, *operands, y, saved, dropout_mask, dropout_mask and ratio, is_causal=options["causal"]
    )[0]
    kernel = definition_of(dq.producer()).kernel(dq.producer(), device)
    assert (kernel.lower is varlen._lower_grad_flash) == chosen, "backward must read what forward's kernel saved"


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
        y, probabilities = varlen_attention(*operands)
        return y, *varlen_attention_backward(cast(dy), *operands, probabilities, False, None, 1.0)

    for name, got, eager, exact in zip(
        ("y", "dq", "dk", "dv"), results, loop(torch.float16), loop(torch.float64), strict=True
    ):
        assert_no_worse_than_eager(name, got, eager, exact)
