"""A training step of a small model in Triton's interpreter, against float64.

    TRITON_INTERPRET=1 python -m tests.gpu_without_one.interpreted_step MODEL DTYPE

It writes the number of results and of kernels, or fails with the first result that exceeds the tolerance.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from onnxtrain.ops.matmul import aligned
from onnxtrain.testing import assert_no_worse_than_eager
from tests.gpu_without_one.fake_gpu import fake_gpu, fake_mode
from tests.gpu_without_one.inductor_code import generate
from tests.gpu_without_one.interpreter import interpreted
from tests.gpu_without_one.launches import Launches, captured

BATCH, LENGTH, TOKENS = 3, 9, 99


def _bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=80,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def _gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_embd=48,
        n_layer=1,
        n_head=3,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=80,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {"bert": _bert, "gpt2": _gpt2, "llama": _llama}


def _inputs() -> dict[str, Any]:
    tokens = torch.randint(TOKENS, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(BATCH, LENGTH) < 0.2, -100)}


def _eager(module: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The loss, the logits and all gradients."""
    module.zero_grad()
    outputs = module(**inputs)
    outputs.loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"loss": outputs.loss.detach(), "logits": outputs.logits.detach(), **gradients}


def _loss(name: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if name != "bert":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def interpreted_step(
    module: torch.nn.Module, inputs: dict[str, Any], folder: Path
) -> tuple[dict[str, torch.Tensor], int]:
    """Return loss, logits and gradients of a step that Inductor generates for a GPU, and the number of its kernels."""
    mode = fake_mode()
    fakes = copy.deepcopy(module)
    capture = captured(lambda: fakes, lambda: inputs, mode, skip_padding="never")
    unit = capture.unit
    with fake_gpu(mode):
        _, fake_call = capture.run(Launches(), Launches())
        codes = [
            generate(unit.forward.part, capture.tensors, (), folder / "forward"),
            generate(fake_call.program.part, fake_call.arguments, fake_call.sizes, folder / "backward"),
        ]
    forward = interpreted(unit.forward.part, codes[0], capture.tensors, (), folder)
    backward = interpreted(fake_call.program.part, codes[1], fake_call.arguments, fake_call.sizes, folder)
    tensors = [capture.real[id(fake)] for fake in capture.tensors]
    with torch.no_grad():
        results, sizes = forward.run(list(tensors), ())
        program = unit.backward(capture.cotangents, capture.needed)
        arguments = [results[unit.first_kept + i] for i in program.kept]
        arguments += [torch.ones_like(results[i]) for i in program.cotangents]
        expected = [(fake.shape, fake.stride()) for fake in fake_call.arguments]
        assert [(t.shape, t.stride()) for t in arguments] == expected
        gradients, _ = backward.run(arguments, [sizes[i] for i in program.sizes])
    names = {id(capture.real[id(fake)]): name for name, fake in fakes.named_parameters()}
    named = {names[id(t)]: g for t, g in zip(tensors, gradients, strict=True) if id(t) in names and g is not None}
    return {"loss": results[0], "logits": results[1], **named}, sum(len(code.kernels) for code in codes)


def main(name: str, dtype: torch.dtype) -> None:
    """Check a step of a model. Its vocabulary is padded if it is narrow, as a large one is on a GPU."""
    torch.manual_seed(0)
    aligned._MIN_PADDED_DIM, aligned._MIN_OTHER_DIM = TOKENS, 48
    module, inputs = MODELS[name]().train(), _inputs()
    exact = _eager(copy.deepcopy(module).to(dtype).double(), inputs)
    eager = _eager(copy.deepcopy(module).to(dtype), inputs)
    with tempfile.TemporaryDirectory() as folder:
        got, count = interpreted_step(module.to(dtype), inputs, Path(folder))
    assert got.keys() == exact.keys(), got.keys() ^ exact.keys()
    largest = max(t.abs().max().item() for key, t in exact.items() if key != "logits")
    # A mean over few tokens of narrow logits is as exact as chance decides, so it is compared with that of its logits.
    dtypes = eager["loss"].dtype, torch.float64  # eager computes the loss of BERT in the dtype of the logits
    eager["loss"], exact["loss"] = (_loss(name, got["logits"].to(d), inputs["labels"]) for d in dtypes)
    for key, value in got.items():
        assert_no_worse_than_eager(f"{name}: {key}", value, eager[key], exact[key], largest)
    sys.stdout.write(f"{len(got)} {count}\n")


if __name__ == "__main__":
    main(sys.argv[1], getattr(torch, sys.argv[2]))
