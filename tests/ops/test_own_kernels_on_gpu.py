"""onnxtrain's Triton kernel of cross entropy, matmuls with padded vocabularies, and a QLoRA model, on a GPU."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.ops.loss import row_losses
from onnxtrain.ops.matmul import aligned
from onnxtrain.testing import assert_no_worse_than_eager
from tests.gpu_without_one import row_kernel

pytestmark = pytest.mark.gpu
ROWS, VOCABULARY, WIDTH = 33, 50257, 256


def test_the_kernel_is_no_worse_than_eager() -> None:
    """With the cases that also run in Triton's interpreter."""
    with torch.device("cuda"):
        row_kernel.check_all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmuls_with_a_padded_vocabulary(dtype: torch.dtype) -> None:
    extra = aligned.missing(VOCABULARY)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, VOCABULARY), (VOCABULARY,))
    x, w, dy, bias = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    for a, b, c, padding in (
        (x, w.t(), bias, (0, 0, extra)),
        (dy, w, None, (0, extra, 0)),
        (dy.t(), x, None, (extra, 0, 0)),
    ):
        eager, exact = (
            torch.matmul(p, q) if r is None else torch.addmm(r, p, q)
            for p, q, r in ((a, b, c), (a.double(), b.double(), None if c is None else c.double()))
        )
        assert_no_worse_than_eager(f"{padding}", aligned.padded_gemm(a, b, c, *padding), eager, exact)


def trained(make: Callable[[], nn.Module], batch: dict[str, torch.Tensor], names: list[str], **options: Any) -> None:
    """Compare loss and gradients of three steps with eager's."""
    eager = make().cuda()
    exact = copy.deepcopy(eager).double()
    mine = copy.deepcopy(eager)
    module = ORTModule(mine, skip_padding="never", **options)
    for _ in range(3):
        results = {}
        for side, run in ((eager, eager), (exact, exact), (mine, module)):
            side.zero_grad()
            loss = run(**batch).loss
            loss.backward()
            results[side] = [loss, *(side.get_parameter(name).grad for name in names)]
        for name, got, theirs, right in zip(
            ("loss", *names), results[mine], results[eager], results[exact], strict=True
        ):
            assert_no_worse_than_eager(name, got.detach(), theirs.detach(), right.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_language_model_trains_with_the_kernel_of_cross_entropy(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    agrees: dict[Any, bool] = {}
    monkeypatch.setattr(row_losses, "_agrees", agrees)

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_embd=WIDTH, n_layer=1, n_head=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        return transformers.GPT2LMHeadModel(config).to(dtype)

    tokens = torch.randint(VOCABULARY, (3, 65), device="cuda")
    names = ["transformer.wte.weight", "transformer.h.0.mlp.c_fc.weight", "transformer.ln_f.weight"]
    with caplog.at_level(logging.WARNING, "onnxtrain"):
        trained(make, {"input_ids": tokens, "labels": tokens}, names, keep_outputs=("loss",))
    assert agrees
    assert all(agrees.values()), caplog.text


def test_a_qlora_model_trains() -> None:
    """Each Linear but the head has a 4-bit weight with quantized scales, and adapters."""
    bnb = pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
    peft = pytest.importorskip("peft", reason="needs the extra qlora")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            narrow = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            narrow.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, narrow)
    adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    eager = peft.get_peft_model(model.cuda(), adapters).train()
    exact = importlib.import_module("tests.trainers.test_qlora").exactly(eager)
    tokens = torch.randint(512, (2, 17), device="cuda")
    names = [name for name, parameter in eager.named_parameters() if parameter.requires_grad]
    results = []
    ours = ORTModule(eager, skip_padding="never", fallback_policy="FALLBACK_DISABLE")
    for side, run in ((eager, ours), (eager, eager), (exact, exact)):
        side.zero_grad()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append([loss.detach(), *(side.get_parameter(name).grad.clone() for name in names)])
    largest = max(float(t.abs().max()) for t in results[2])
    for name, *of_sides in zip(("loss", *names), *results, strict=True):
        assert_no_worse_than_eager(name, *of_sides, largest=largest)
