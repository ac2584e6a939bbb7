"""Decomposed attention becomes one op: the forms that do, those that are refused, and no other change."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.report import Refusal
from tests.op_case import Spec
from tests.ops.captures import FunctionModule, check_capture
from tests.reference import assert_matches_float64
from tests.thinned import covering, slow_except
from tests.zoo import huggingface
from tests.zoo.checks import Comparison, Result, compare_named
from tests.zoo.entry import Call, Draw, ZooModel, ragged_mask

HEADS, WIDTH = 2, 4
SIZES = ({"b": 3, "l": 5, "s": 6}, {"b": 2, "l": 7, "s": 4}, {"b": 1, "l": 1, "s": 1})
LOWEST = torch.finfo(torch.float32).min
QKV = (Spec("b l 8"), Spec("b s 8"), Spec("b s 8"))
SQUARE = (Spec("b l 8"),) * 3
SCALE = WIDTH**-0.5


def heads(x: torch.Tensor, count: int = HEADS) -> torch.Tensor:
    """[b, s, h * e] as [b, h, s, e]."""
    return x.view(x.shape[0], -1, count, WIDTH).transpose(1, 2)


def together(y: torch.Tensor) -> torch.Tensor:
    return y.transpose(1, 2).flatten(2)


def nodes(ours: torch.nn.Module) -> list[str]:
    """The ops of the optimized graph's forward nodes, without their domains."""
    return [node.op_type for node in unit(ours).forward.part.nodes]


def unit(ours: torch.nn.Module) -> Any:
    return engine_of(ours).newest().unit


def refusals(ours: torch.nn.Module) -> list[Refusal]:
    report = engine_of(ours).newest().report
    return [refusal for refusal in report.refused if refusal.pass_name == "fuse_attention"]


FUSED = {"ScaledDotProductAttention", "ScaledDotProductAttentionDropout", "MemoryEfficientAttention"}


def fused(ours: torch.nn.Module) -> int:
    """The fused attention ops: a machine with a compiler has MemoryEfficientAttention."""
    return sum(kind in FUSED for kind in nodes(ours))


# Forms. Each is a function of q, k, v and more, and computes attention in its own way.


def scaled_behind(q, k, v):
    return together(torch.softmax(heads(q) @ heads(k).mT / math.sqrt(WIDTH), -1) @ heads(v))


def scaled_query(q, k, v):
    return together(torch.softmax((heads(q) * 0.3) @ heads(k).transpose(-1, -2), -1) @ heads(v))


def scaled_both(q, k, v):
    return together(torch.softmax((heads(q) * 0.5) @ (heads(k) / 3).mT * 2, -1) @ heads(v))


def einsums(q, k, v):
    q, k, v = (x.view(x.shape[0], -1, HEADS, WIDTH) for x in (q, k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * SCALE
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def einsums_turned(q, k, v):
    scores = torch.einsum("bhje,bhie->bhij", heads(k), heads(q)) * SCALE
    return together(torch.einsum("bhjd,bhij->bhid", heads(v), scores.softmax(-1)))


def three_axes(q, k, v):
    """As BART and T5 once did: batches and heads are one axis, and part for the mask."""
    q, k, v = (heads(x) for x in (q, k, v))
    b, h, length, _ = q.shape
    rows = [x.reshape(b * h, -1, WIDTH) for x in (q, k, v)]
    scores = torch.bmm(rows[0] * SCALE, rows[1].transpose(1, 2)).view(b, h, length, -1)
    scores = scores + torch.arange(scores.shape[-1], dtype=q.dtype)
    y = torch.bmm(torch.softmax(scores.view(b * h, length, -1), -1), rows[2])
    return together(y.view(b, h, length, WIDTH))


def baddbmm(q, k, v):
    """As Bloom does: a bias that depends on the column."""
    rows = [heads(x).reshape(-1, x.shape[1], WIDTH) for x in (q, k, v)]
    slope = torch.arange(rows[1].shape[1], dtype=q.dtype).expand(rows[0].shape[0], 1, -1)
    scores = torch.baddbmm(slope, rows[0], rows[1].transpose(1, 2), beta=0.25, alpha=SCALE)
    return together(torch.bmm(scores.softmax(-1), rows[2]).view(q.shape[0], HEADS, -1, WIDTH))


def one_head(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(8), -1) @ v


def one_sequence(q, k, v):
    return torch.softmax(q[0] @ k[0].mT / math.sqrt(8), -1) @ v[0]


def shared_heads(q, k, v):
    """As Llama does: each head of k and v serves several of q."""
    k, v = (heads(x, 2)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, -1, WIDTH) for x in (k, v))
    weights = torch.softmax(heads(q, 4) @ k.mT * SCALE, -1, dtype=torch.float32).to(q.dtype)
    return together(weights @ v)


def masked_causal(q, k, v):
    """As nanoGPT does."""
    scores = heads(q) @ heads(k).mT * SCALE
    length = scores.shape[-1]
    seen = torch.tril(torch.ones(length, length, dtype=torch.bool)).view(1, 1, length, length)
    return together(F.softmax(scores.masked_fill(seen.logical_not(), -math.inf), -1) @ heads(v))


def chosen_then_shifted(q, k, v, bias):
    """As GPT-2 once did."""
    seen = bias > -1
    scores = torch.where(seen, heads(q) @ heads(k).mT * SCALE, torch.tensor(-math.inf))
    return together((scores + torch.where(seen[..., :1], 0.0, LOWEST)).softmax(-1) @ heads(v))


def scaled_behind_masks(q, k, v, bias):
    scores = (heads(q) @ heads(k).mT + bias) / 3
    return together(torch.softmax(scores - bias.abs(), -1) @ heads(v))


def three_masks(q, k, v, bias):
    scores = heads(q) @ heads(k).mT * SCALE + bias
    return together((bias[:1] + (bias[:, :1] + scores)).softmax(-1) @ heads(v))


BIAS = Spec("b 2 l s")
FORMS = {
    "scaled behind": (scaled_behind, QKV),
    "scaled query": (scaled_query, QKV),
    "scaled both": (scaled_both, QKV),
    "einsums": (einsums, QKV),
    "einsums turned": (einsums_turned, QKV),
    "three axes": (three_axes, QKV),
    "baddbmm": (baddbmm, SQUARE),
    "one head": (one_head, QKV),
    "one sequence": (one_sequence, QKV),
    "shared heads": (shared_heads, (Spec("b l 16"), *QKV[1:])),
    "causal": (masked_causal, SQUARE),
    "chosen, then shifted": (chosen_then_shifted, (*QKV, BIAS)),
    "scaled behind masks": (scaled_behind_masks, (*QKV, BIAS)),
    "three masks": (three_masks, (*QKV, BIAS)),
}


@pytest.mark.parametrize("form", slow_except(FORMS, "scaled behind", "baddbmm", "shared heads", "scaled behind masks"))
def test_a_form_becomes_one_op(form: str) -> None:
    function, specs = FORMS[form]
    ours = check_capture(function, *specs, sizes=SIZES)
    assert fused(ours) == 1
    assert "Softmax" not in nodes(ours)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("scaled behind", torch.float64),
        pytest.param("shared heads", torch.bfloat16, marks=pytest.mark.slow),
        ("causal", torch.bfloat16),
    ],
    ids=str,
)
def test_a_form_in_other_types(form: str, dtype: torch.dtype) -> None:
    function, specs = FORMS[form]
    assert fused(check_capture(function, *specs, dtype=dtype, sizes=SIZES)) == 1


# Rows that are masked whole


def _hidden(sizes: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A mask with a hidden column; the last row is fully masked."""
    hidden = torch.rand(sizes, generator=generator) < 0.3
    hidden[..., -1, :] = True
    return hidden


HIDDEN = Spec("b 1 l s", dtype="bool", make=_hidden)


@pytest.mark.parametrize(
    ("way", "number"),
    covering(["added", "filled", "chosen"], [-math.inf, LOWEST, pytest.param(-1e4, marks=pytest.mark.slow)]),
    ids=str,
)
def test_a_row_that_is_masked_whole_is_as_in_eager(way: str, number: float) -> None:
    """-inf gives NaN; the least number gives equal probabilities, and a gradient only where it is added."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = heads(q) @ heads(k).mT * SCALE
        if way == "added":
            scores = scores + torch.where(hidden, number, 0.0).to(q.dtype)
        elif way == "filled":
            scores = scores.masked_fill(hidden, number)
        else:
            scores = torch.where(hidden.logical_not(), scores, number)
        return together(scores.softmax(-1) @ heads(v))

    assert fused(check_capture(attend, *QKV, HIDDEN, sizes=SIZES)) == 1


# Dropout


def dropped(q, k, v):
    return together(F.dropout(torch.softmax(heads(q) @ heads(k).mT * SCALE, -1), 0.4) @ heads(v))


def with_sdpa(q, k, v):
    return together(F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True, dropout_p=0.4))


@pytest.mark.parametrize("function", slow_except([dropped, with_sdpa], with_sdpa))
def test_dropout_keeps_the_same_in_forward_and_backward(function: Any) -> None:
    """Y is linear in v: its gradient shows which probabilities forward used."""
    ours = ORTModule(FunctionModule(function))
    for batch, length in ((2, 64), (1, 33)):
        q, k = torch.randn(2, batch, length, 8)
        v, dy = torch.randn(2, batch, length, 8, dtype=torch.float32)
        v.requires_grad_()
        y = ours(q, k, v)
        (dv,) = torch.autograd.grad(y, v, dy)
        sums, expected = ((a.double() * b).sum(1) for a, b in ((v, dv), (y, dy)))  # over positions
        assert_matches_float64(sums.detach().float(), expected.detach())
    assert fused(ours) == 1


@pytest.mark.parametrize("function", slow_except([dropped, with_sdpa], dropped))
def test_dropout_keeps_as_much_as_it_should(function: Any) -> None:
    """The average over samples is the result without dropout."""
    ours = ORTModule(FunctionModule(function))
    tensors = torch.randn(3, 1, 40, 8).unbind()
    torch.manual_seed(0)
    draws = torch.stack([ours(*tensors) for _ in range(400)])
    causal = function is with_sdpa
    exact = together(F.scaled_dot_product_attention(*map(heads, tensors), is_causal=causal))
    deviations = (draws.mean(0) - exact) / (draws.std(0) / 20)
    assert deviations.abs().max() < 6
    assert 0.6 < deviations.abs().mean() < 1.0  # 0.8 of a normal distribution
    assert not torch.equal(ours(*tensors), ours(*tensors))


@pytest.mark.parametrize("function", slow_except([dropped, with_sdpa], dropped))
def test_rng_torch_gives_eagers_bits(function: Any) -> None:
    ours = ORTModule(FunctionModule(function), rng="torch")
    results = []
    for run in (ours, function):
        torch.manual_seed(3)
        leaves = [x.requires_grad_() for x in torch.randn(3, 2, 9, 8).unbind()]
        y = run(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves), torch.get_rng_state()])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    assert [r.reason for r in refusals(ours)] == ['its dropout reproduces eager\'s random numbers (rng="torch")']


# Refusals


def probabilities_returned(q, k, v):
    p = torch.softmax(heads(q) @ heads(k).mT, -1)
    return p @ heads(v), p


def dropped_probabilities_returned(q, k, v):
    p = F.dropout(torch.softmax(heads(q) @ heads(k).mT, -1), 0.5)
    return p @ heads(v), p.detach()


def scores_returned(q, k, v):
    scores = heads(q) @ heads(k).mT
    return torch.softmax(scores, -1) @ heads(v), scores


def scaled_by_a_tensor(q, k, v):
    return torch.softmax(heads(q) @ heads(k).mT * q.mean(), -1) @ heads(v)


def filled_then_shifted(q, k, v):
    scores = (heads(q) @ heads(k).mT).masked_fill(torch.eye(q.shape[1], dtype=torch.bool), LOWEST)
    return torch.softmax(scores + torch.ones(q.shape[1]), -1) @ heads(v)


def filled_then_biased(q, k, v):
    scores = (heads(q) @ heads(k).mT).masked_fill(torch.eye(q.shape[1], dtype=torch.bool), -math.inf)
    return torch.softmax(scores + k.mean(), -1) @ heads(v)


def five_axes(q, k, v):
    q, k, v = (heads(x).unsqueeze(1) for x in (q, k, v))
    return torch.softmax(q @ k.mT, -1) @ v


REFUSED = {
    probabilities_returned: "its probabilities have other users",
    dropped_probabilities_returned: "its probabilities have other users",
    scores_returned: "its scores have other users",
    scaled_by_a_tensor: "its scores are scaled by a tensor",
    filled_then_shifted: f"a mask is added to scores that were filled with {LOWEST}",
    filled_then_biased: "a mask that may have a gradient is added after a Where",
    five_axes: "its scores have more than two batch and head dimensions",
}


@pytest.mark.parametrize(
    "function", slow_except(REFUSED, *(f for f in REFUSED if f is not probabilities_returned)), ids=lambda f: f.__name__
)
def test_refusals_have_a_reason_and_right_results(function: Any) -> None:
    if function is dropped_probabilities_returned:
        ours = ORTModule(FunctionModule(function))
        ours(*torch.randn(3, 2, 5, 8, requires_grad=True).unbind())
    else:
        ours = check_capture(function, *SQUARE, sizes=SIZES[:2])
    assert [r.reason for r in refusals(ours)] == [REFUSED[function]]
    assert fused(ours) == 0


def test_a_softmax_that_is_no_attention_is_not_mentioned() -> None:
    def classify(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(q @ k.mT, -2) @ v, torch.softmax(q, -1), torch.softmax(q, -1) @ v.mT

    ours = check_capture(classify, *SQUARE, sizes=SIZES[:2])
    assert refusals(ours) == []


# Models of transformers, with attn_implementation="eager"


def _written_out(entry: ZooModel, left: bool) -> ZooModel:
    """With padding on the left, the first rows of a causal model are fully masked."""

    def make() -> torch.nn.Module:
        model = entry.make()
        model.set_attn_implementation("eager")  # type: ignore[operator]
        return model

    def call(draw: Draw, batch: int, length: int) -> Call:
        padded_call = entry.call(draw, batch, length)
        mask = {"attention_mask": ragged_mask(batch, length).flip(1)} if left else {}
        return Call(kwargs={**padded_call.kwargs, **mask})

    return dataclasses.replace(entry, make=make, call=call)


LAYERS = {"bert-classifier": 2, "gpt2": 2, "llama": 2, "t5": 6, "vit": 2}
MODELS = [_written_out(entry, left=entry.name == "gpt2") for entry in huggingface.MODELS if entry.name in LAYERS]
FIRST = {"bert-classifier"}


@pytest.mark.parametrize(
    "entry", [m if m.name in FIRST else pytest.param(m, marks=pytest.mark.slow) for m in MODELS], ids=str
)
def test_models_equal_eager(entry: ZooModel) -> None:
    check_model(entry, torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_models_equal_eager_in_float64(entry: ZooModel) -> None:
    """Llama and ViT take the softmax of scores in float32, whatever their type is: that stays as it is written."""
    narrow = entry.name in {"llama", "vit"}
    ours = check_model(entry, torch.float64, fuses=not narrow)
    assert {r.reason for r in refusals(ours)} == (
        {"its softmax has another element type than query and key"} if narrow else set()
    )


@pytest.mark.slow
@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_models_equal_eager_under_autocast(entry: ZooModel) -> None:
    """Losses and gradients of several batches together: how far eager's are off shows by many numbers, not by one."""
    compare = Comparison(entry, torch.float32, autocast=True)
    compare.change(torch.nn.Module.eval)  # without dropout
    length = entry.sizes[0][1]
    results = [[side.train(batch, length) for side in compare.sides()] for batch in range(1, 9)]
    got, eager, exact = zip(*results, strict=True)
    compare_named(entry.name, *map(_together, (got, eager, exact)))
    assert fused(compare.got.run) == LAYERS[entry.name]


def _together(results: Sequence[Result]) -> dict[str, torch.Tensor | None]:
    losses = torch.stack([r.loss for r in results if r.loss is not None])
    names = [name for name, gradient in results[0].gradients.items() if gradient is not None]
    return {"loss": losses, **{n: torch.stack([r.gradients[n] for r in results]) for n in names}}  # type: ignore[misc]


def check_model(entry: ZooModel, dtype: torch.dtype, fuses: bool = True) -> torch.nn.Module:
    """Outputs and gradients without dropout, at all sizes of the zoo, and that each attention is one op."""
    compare = Comparison(entry, dtype)
    compare.change(torch.nn.Module.eval)  # without dropout
    for sizes in entry.sizes:
        compare.train(*sizes)
    assert fused(compare.got.run) == LAYERS[entry.name] * fuses
    return compare.got.run
