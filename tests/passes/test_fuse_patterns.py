"""Decomposed norms, activations and rotary embeddings become one op each; saved graphs show these ops."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from onnxtrain import DebugOptions, ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.graph.builder import Builder
from onnxtrain.onnx_file import without_case_suffix
from onnxtrain.passes.fuse_patterns import REWRITES, register
from onnxtrain.passes.patterns import Match, Rewrite, Var, op
from tests.op_case import Spec
from tests.ops.captures import check_capture
from tests.passes.test_fuse_attention import FUSED, LAYERS
from tests.zoo import huggingface
from tests.zoo.checks import Comparison
from tests.zoo.entry import Call, ZooModel, mean_square

X, W, B = Spec("b s 6"), Spec("6"), Spec("6")
ROOT = math.sqrt(2 / math.pi)


def kinds(ours: torch.nn.Module) -> list[str]:
    """The ops of the forward program's nodes."""
    return [node.op_type for node in engine_of(ours).newest().unit.forward.part.nodes]


def reasons(ours: torch.nn.Module) -> list[str]:
    report = engine_of(ours).newest().report
    return [refusal.reason for refusal in report.refused if refusal.pass_name == "fuse_patterns"]


# Forms


def rms_rsqrt(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rms_root(x, w):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w


def rms_in_float(x, w):
    """As Llama and T5 do."""
    wide = x.to(torch.float32)
    return w * (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5)).to(x.dtype)


def rms_shifted(x, w):
    """As Gemma does."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + w)


def layer_norm(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return w * (centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5)) + b


def layer_norm_of_parts(x, w, b):
    """As BERT once did: the difference is computed twice."""
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return b + (x - mean) * torch.rsqrt(variance + 1e-12) * w


def gelu_tanh(x):
    """As GPT-2 does."""
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_tanh_factored(x):
    """As Megatron does."""
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_exact(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


def swish(x):
    return torch.sigmoid(x) * x


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def of_width_6(*tensors):
    """Tensors whose last axis is known to be 6 when they are captured, as that of a model's heads is."""
    return (x.reshape(*x.shape[:-1], 6) for x in tensors)


def rotary(x, cos, sin):
    x, cos, sin = of_width_6(x, cos, sin)
    return x * cos + rotate_half(x) * sin


def rotary_chunked(x, cos, sin):
    x, cos, sin = of_width_6(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], -1) * sin + cos * x


NORM, AFFINE, TABLES = (X, W), (X, W, B), (X, Spec("s 6"), Spec("s 6"))
FORMS: dict[Any, tuple[str, tuple[Spec, ...]]] = {
    rms_rsqrt: ("SimplifiedLayerNormalization", NORM),
    rms_root: ("SimplifiedLayerNormalization", NORM),
    rms_in_float: ("SimplifiedLayerNormalization", NORM),
    rms_shifted: ("SimplifiedLayerNormalization", NORM),
    layer_norm: ("LayerNormalization", AFFINE),
    layer_norm_of_parts: ("LayerNormalization", AFFINE),
    gelu_tanh: ("FastGelu", (X,)),
    gelu_tanh_factored: ("FastGelu", (X,)),
    gelu_exact: ("Gelu", (X,)),
    quick_gelu: ("QuickGelu", (X,)),
    swish: ("QuickGelu", (X,)),
    rotary: ("RotaryEmbedding", TABLES),
    rotary_chunked: ("RotaryEmbedding", TABLES),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_a_form_becomes_one_op(form: Any) -> None:
    kind, specs = FORMS[form]
    ours = check_capture(form, *specs)
    assert kinds(ours).count(kind) == 1
    assert not {"Rsqrt", "Sqrt", "Tanh", "Erf", "Sigmoid", "Concat", "Neg", "Pow"} & set(kinds(ours))


@pytest.mark.parametrize("form", [rms_in_float, rotary], ids=lambda f: f.__name__)
def test_a_form_in_bfloat16(form: Any) -> None:
    kind, specs = FORMS[form]
    assert kinds(check_capture(form, *specs, dtype=torch.bfloat16)).count(kind) == 1


def test_an_activation_in_bfloat16_stays_as_it_is_rounded() -> None:
    kind, specs = FORMS[gelu_tanh]
    assert kind not in kinds(check_capture(gelu_tanh, *specs, dtype=torch.bfloat16))


@pytest.mark.parametrize("form", [layer_norm, gelu_tanh, rotary, swish], ids=lambda f: f.__name__)
def test_a_form_in_float64(form: Any) -> None:
    kind, specs = FORMS[form]
    assert kinds(check_capture(form, *specs, dtype=torch.float64)).count(kind) == 1


# Similar subgraphs that are not fused


def over_rows(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6))


def other_number(x):
    return 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.0447 * torch.pow(x, 3.0))))


def two_values(x, w):
    return x * torch.sigmoid(w * 1.5)


def turned_back(x, cos, sin):
    x, cos, sin = of_width_6(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-first, second], -1) * sin + cos * x


def unequal_parts(x, cos, sin):
    x, cos, sin = of_width_6(x, cos, sin)
    return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin


UNLIKE: dict[Any, tuple[Spec, ...]] = {
    over_rows: NORM,
    other_number: (X,),
    two_values: NORM,
    turned_back: TABLES,
    unequal_parts: TABLES,
}


@pytest.mark.parametrize("form", UNLIKE, ids=lambda f: f.__name__)
def test_similar_subgraphs_are_not_fused(form: Any) -> None:
    ours = check_capture(form, *UNLIKE[form])
    assert not {kind for kind, _ in FORMS.values()} & set(kinds(ours))


def test_a_value_inside_that_is_read_elsewhere_is_named() -> None:
    def norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * (x * inverse), inverse

    ours = check_capture(norm, *NORM)
    assert "SimplifiedLayerNormalization" not in kinds(ours)
    assert any(reason.endswith("rsqrt has other users") for reason in reasons(ours))


@pytest.mark.parametrize(("beta", "rewritten"), [(1.0, True), (2.0, False)])
def test_a_pattern_of_ones_own(beta: float, rewritten: bool) -> None:
    """Mish, which models write as x * tanh(softplus(x)); a Softplus of another domain has a beta."""

    def build(ops: Builder, match: Match, old: ir.Value) -> ir.Value:
        result: ir.Value = ops.Mish(match.values["x"])
        return result

    own = register(Rewrite("Mish", op("Mul", Var("x"), op("Tanh", op("Softplus", Var("x")))), build))
    try:
        ours = check_capture(lambda x: x * torch.tanh(torch.nn.functional.softplus(x, beta)), X)
    finally:
        REWRITES.remove(own)
    assert ("Mish" in kinds(ours)) == rewritten


# Saved graphs


def saved_ops(module: torch.nn.Module, folder: Path, *arguments: Any, **keywords: Any) -> Counter[str]:
    """The ops of the forward graph that DebugOptions(save_onnx=True) writes before differentiation."""
    ours = ORTModule(module, DebugOptions(save_onnx=True, onnx_prefix="block", save_path=folder))
    ours(*arguments, **keywords)
    graph = ir.load(folder / "block_optimized_pre_grad_training.onnx").graph
    return Counter(f"{node.domain or 'onnx'}::{without_case_suffix(node.op_type)}" for node in graph)


def _shown(name: str, folder: Path) -> Counter[str]:
    entry = next(model for model in huggingface.MODELS if model.name == name)
    model = entry.build()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    call = entry.arguments(3, 9)
    return saved_ops(model, folder, *call.args, **call.kwargs)


def attentions(op_counts: Counter[str]) -> int:
    return sum(op_counts[f"onnxtrain::{name}"] for name in FUSED)


def test_the_saved_graph_of_llama_shows_its_blocks(tmp_path: Path) -> None:
    op_counts = _shown("llama", tmp_path)
    assert op_counts["com.microsoft::SimplifiedLayerNormalization"] == 5
    assert op_counts["onnxtrain::RotaryEmbedding"] == 4
    assert op_counts["onnxtrain::GatedActivation"] == 2
    assert attentions(op_counts) == LAYERS["llama"]
    assert not op_counts["onnx::Softmax"]


@pytest.mark.slow  # its norms are Llama's, its attention is found in tests/passes/test_fuse_attention.py
def test_the_saved_graph_of_t5_shows_its_blocks(tmp_path: Path) -> None:
    op_counts = _shown("t5", tmp_path)
    assert op_counts["com.microsoft::SimplifiedLayerNormalization"] == 12
    assert attentions(op_counts) == LAYERS["t5"]
    assert not op_counts["onnx::Softmax"]


class Gpt2Block(torch.nn.Module):
    """A block of GPT-2 whose attention is written by hand, as in nanoGPT."""

    def __init__(self, width: int = 16, heads: int = 2, longest: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.behind = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.1)
        self.register_buffer("seen", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        y = self.dropout(torch.softmax(scores, dim=-1)) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attend(self.before(x)))
        result: torch.Tensor = x + self.dropout(self.down(gelu_tanh(self.up(self.behind(x)))))
        return result


def test_the_saved_graph_of_a_hand_written_block_shows_it(tmp_path: Path) -> None:
    op_counts = saved_ops(Gpt2Block(), tmp_path, torch.randn(2, 5, 16))
    assert attentions(op_counts) == 1
    assert op_counts["com.microsoft::FastGelu"] == 1
    assert op_counts["onnx::LayerNormalization"] == 2
    assert not op_counts["onnx::Softmax"] + op_counts["onnx::Tanh"]


def test_a_hand_written_block_equals_eager() -> None:
    entry = ZooModel(
        "block", Gpt2Block, lambda draw, batch, length: Call((draw.floats(batch, length, 16),)), mean_square
    )
    compare = Comparison(entry)
    compare.change(torch.nn.Module.eval)
    for sizes in entry.sizes:
        compare.train(*sizes)
    assert FUSED & set(kinds(compare.got.run))
