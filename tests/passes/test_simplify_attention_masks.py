"""Masks that hide nothing are dropped, causal ones become a flag, all others stay; results are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
import transformers

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.values import TensorType, set_type
from onnxtrain.ops import builder
from onnxtrain.ops.interfaces.element_formulas import Affine, Conditions
from onnxtrain.passes.element_formulas import Formulas
from tests.zoo.checks import compared
from tests.zoo.entry import Call, Draw, ZooModel, ragged_mask

WIDTH, VOCABULARY = 8, 50
Mask = Callable[[torch.Tensor], torch.Tensor]


class Attention(torch.nn.Module):
    """Attention of x with a mask that is computed from its sizes."""

    def __init__(self, mask: Mask, by_hand: bool = False) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.mask, self.by_hand = mask, by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if not self.by_hand:
            return F.scaled_dot_product_attention(q, k, v, self.mask(x))
        return (q @ k.mT).masked_fill(self.mask(x).logical_not(), -torch.inf).softmax(-1) @ v


def rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])[:, None]


def columns(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1])


def packed(x: torch.Tensor) -> torch.Tensor:
    """As transformers does when it traces: positions that do not go up by one begin another sequence."""
    positions = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    numbers = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    return same & (columns(x) <= rows(x))


CAUSAL: dict[str, Mask] = {
    "less or equal": lambda x: columns(x) <= rows(x),
    "greater or equal": lambda x: rows(x) >= columns(x),
    "less": lambda x: columns(x) < rows(x) + 1,
    "not above": lambda x: (columns(x) > 100 - 200) & (columns(x) <= rows(x)),
    "expanded": lambda x: (columns(x) <= rows(x))[None, None].expand(x.shape[0], 1, -1, -1),
    "packed": packed,
}
NOTHING: dict[str, Mask] = {
    "not negative": lambda x: (rows(x) >= 0).expand(-1, x.shape[1]),
    "ones": lambda x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool),
    "no sequence ends": lambda x: rows(x) + columns(x) >= 0,
}
OTHERS: dict[str, Mask] = {
    "window": lambda x: (columns(x) <= rows(x)) & (columns(x) > rows(x) - 3),
    "above": lambda x: columns(x) >= rows(x),
    "not itself": lambda x: (columns(x) < rows(x)) | (rows(x) == 0),
    "one later": lambda x: columns(x) <= rows(x) + 1,
    "even": lambda x: columns(x) * 2 <= rows(x) * 2 + 1,
    "other offset": lambda x: torch.arange(1, x.shape[1] + 1) <= rows(x) + 1 + (rows(x) * 0).sum(),
    "first columns": lambda x: (columns(x) <= 3).expand(x.shape[1], -1),
    "one row for all": lambda x: torch.ones(1, x.shape[1], dtype=torch.bool).tril(),
    "one row for all, additive": lambda x: torch.zeros(1, x.shape[1]).masked_fill(columns(x) > 0, -torch.inf),
    "one row for all, of positions": lambda x: columns(x) <= torch.arange(1)[:, None],
    "one constant row for all": lambda x: torch.tensor([[0.0] + [-torch.inf] * 8])[:, : x.shape[1]],
    "by element": lambda x: (x[:, None, None, :, 0] > -1e9) & (columns(x) <= rows(x)),
}


def entry(mask: Mask, by_hand: bool = False) -> ZooModel:
    return ZooModel(
        "attention",
        lambda: Attention(mask, by_hand),
        lambda draw, batch, length: Call((draw.floats(batch, length, WIDTH),)),
        lambda output: output.square().mean(),
    )


def attentions(wrapped: Any) -> list[ir.Node]:
    graph = engine_of(wrapped).newest().captured.model.graph
    return [node for node in graph if "Attention" in node.op_type]


LIKE_OTHERS = ("greater or equal", "less", "not above", "not negative", "above", "even")
BY_HAND = ("less or equal", "ones", "window")  # how the op got its mask changes nothing of what the mask is


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        *(
            pytest.param(name, False, marks=[pytest.mark.slow] if name in LIKE_OTHERS else [])
            for name in (*CAUSAL, *NOTHING, *OTHERS)
        ),
        *((name, True) for name in BY_HAND),
    ],
)
def test_equals_eager(name: str, by_hand: bool) -> None:
    mask = {**CAUSAL, **NOTHING, **OTHERS}[name]
    with compared(entry(mask, by_hand)) as compare:
        for sizes in ((3, 9), (1, 6)):
            compare.train(*sizes)
    (node,) = attentions(compare.got.run)
    has_mask = any(x is not None for x in node.inputs[3:])
    if name in NOTHING:
        assert not has_mask
    elif name in OTHERS:
        assert has_mask
        assert "is_causal" not in node.attributes
    elif node.op_type == "FlashAttention":
        assert not has_mask
        assert node.attributes["is_causal"].as_int() == 1


def test_sizes_of_one_are_another_capture_or_the_same_numbers() -> None:
    with compared(entry(packed), captures=None) as compare:
        for sizes in ((3, 9), (2, 1), (1, 1), (1, 5)):
            compare.train(*sizes)


def language_model(padded: bool, positions: bool) -> ZooModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, use_cache=False,
    )  # fmt: skip

    def call(draw: Draw, batch: int, length: int) -> Call:
        ids = draw.ints(VOCABULARY, batch, length)
        given: dict[str, Any] = {"input_ids": ids, "labels": ids}
        if padded:
            given["attention_mask"] = ragged_mask(batch, length)
        if positions:  # two sequences in each row
            given["position_ids"] = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)]).repeat(
                batch, 1
            )
        return Call(kwargs=given)

    return ZooModel("llama", lambda: transformers.LlamaForCausalLM(config), call)


@pytest.mark.parametrize(
    ("padded", "positions"),
    [
        (True, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, False), (False, True))),
    ],
)
def test_models_of_transformers(padded: bool, positions: bool) -> None:
    """Without padding the mask is causal; padding and positions that the user gives keep theirs."""
    with compared(language_model(padded, positions)) as compare:
        for sizes in ((3, 9), (2, 6)):
            compare.train(*sizes)
    (node,) = attentions(compare.got.run)
    assert ("is_causal" in node.attributes) == (not padded and not positions)


def test_bert_without_padding_has_no_mask() -> None:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    wrapped = ORTModule(transformers.BertForMaskedLM(config))
    wrapped(input_ids=torch.zeros(2, 9, dtype=torch.long))
    assert not any(x is not None for node in attentions(wrapped) for x in node.inputs[3:5])


# Formulas


def formula(make: Callable[[Any, ir.Value], ir.Value]) -> Any:
    """Return the formula of what `make` computes from the positions i of a sequence."""
    length = ir.Value(name="length")
    set_type(length, TensorType(ir.DataType.INT64, ()))
    op = builder(ir.Graph([length], [], nodes=[], opset_imports={"": 23}, name="formulas"))
    positions = op.node(
        "", "Range", (op.scalar(0, ir.DataType.INT64), length, op.scalar(1, ir.DataType.INT64)), {},
        types=[TensorType(ir.DataType.INT64, ("n",))],
    ).outputs[0]  # fmt: skip
    return Formulas().formula_of(make(op, positions))


def integer(op: Any, value: int) -> ir.Value:
    constant: ir.Value = op.scalar(value, ir.DataType.INT64)
    return constant


def test_formulas_of_arithmetic() -> None:
    assert formula(lambda op, i: i) == Affine(0, (1,))
    assert formula(lambda op, i: op.Add(i, integer(op, 3))) == Affine(3, (1,))
    assert formula(lambda op, i: op.Sub(integer(op, 3), i)) == Affine(3, (-1,))
    assert formula(lambda op, i: op.Add(i, i)) == Affine(0, (2,))
    assert formula(lambda op, i: op.Mul(i, i)) is None


def test_formulas_of_comparisons() -> None:
    assert formula(lambda op, i: op.GreaterOrEqual(i, integer(op, 0))) == Conditions(frozenset())
    assert formula(lambda op, i: op.Less(i, integer(op, 5))) == Conditions(frozenset({Affine(-4, (1,))}))
    assert formula(lambda op, i: op.Equal(i, i)) == Conditions(frozenset())
    assert formula(lambda op, i: op.Equal(i, integer(op, 2))) is None
    assert formula(lambda op, i: op.Not(op.Equal(i, i))).is_false


def test_a_long_chain_takes_no_time() -> None:
    def doubled(op: Any, i: ir.Value) -> ir.Value:
        for _ in range(60):
            i = op.Sub(op.Add(i, i), i)
        return i

    assert formula(doubled) == Affine(0, (1,))
