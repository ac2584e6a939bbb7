"""Hugging Face's Trainer, accelerate and Lightning with each of the three ways in: the losses are eager's."""

from __future__ import annotations

import copy
import os
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import onnxtrain
from onnxtrain import ORTModule
from onnxtrain.testing import assert_no_worse_than_eager
from tests.reference import assert_matches

pytestmark = pytest.mark.slow
STEPS, LENGTH, COUNT = 10, 16, 64


def texts(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Pieces of Python's help, as bytes; the label says whether a piece has a capital letter."""
    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    rows = []
    for number in range(COUNT):
        start = (number * 997 + seed * 31) % 50_000
        piece = text[start : start + LENGTH]
        tokens = torch.tensor([min(ord(c), 127) for c in piece])
        rows.append({"input_ids": tokens, "labels": torch.tensor(int(piece != piece.lower()))})
    return rows


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {"bert": bert, "gpt2": gpt2}


def rows_for(name: str, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    rows = texts(seed)
    return rows if name == "bert" else [{"input_ids": r["input_ids"], "labels": r["input_ids"]} for r in rows]


every_model = pytest.mark.parametrize("name", list(MODELS))
every_entry = pytest.mark.parametrize("entry", ["ORTModule", "prepare", "blocks", "compile"])


def enter(model: nn.Module, entry: str) -> nn.Module:
    torch.compiler.reset()
    match entry:
        case "ORTModule":
            return ORTModule(model)
        case "prepare":
            return onnxtrain.prepare(model)
        case "blocks":
            return onnxtrain.prepare(model, regional=True)
        case "compile":
            model.compile(backend="onnxtrain")
    return model


@pytest.fixture(autouse=True)
def no_fallbacks(recwarn: pytest.WarningsRecorder) -> Any:
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    os.environ.clear()  # TrainingArguments(torch_compile=True) tells accelerate by variables
    os.environ.update(before)
    assert not [str(w.message) for w in recwarn if "runs in PyTorch" in str(w.message)]


def same(got: list[float], expected: list[float], exact: list[float]) -> None:
    """Judge losses by those of eager PyTorch in float64."""
    assert len(got) == len(expected) >= 3
    wide = torch.tensor(exact, dtype=torch.float64)
    assert_no_worse_than_eager("losses", torch.tensor(got), torch.tensor(expected), wide)


# Hugging Face's Trainer


def trained(model: nn.Module, name: str, folder: Path, resume: bool = False, **more: Any) -> list[float]:
    """The losses of training and of evaluation, in order."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        max_grad_norm=0.5, learning_rate=1e-3, logging_steps=1, eval_strategy="steps", eval_steps=5, save_steps=5,
        report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False, seed=3,
        label_smoothing_factor=0.1 if name == "bert" else 0.0, label_names=["labels"], **more,
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows_for(name), eval_dataset=rows_for(name, seed=1)[:8]
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5") if resume else None)
    losses = [log[key] for log in trainer.state.log_history for key in ("loss", "eval_loss") if key in log]
    return [float(value) for value in losses]


@every_model
@pytest.mark.parametrize("entry", ["ORTModule", "prepare", "blocks", "torch_compile"])
def test_trainer(name: str, entry: str, tmp_path: Path) -> None:
    torch.compiler.reset()
    expected = trained(MODELS[name](), name, tmp_path / "eager")
    more: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "onnxrt"}
    more = more if entry == "torch_compile" else {}
    got = trained(enter(MODELS[name](), entry), name, tmp_path / "ours", **more)
    exact = trained(MODELS[name]().double(), name, tmp_path / "exact")
    assert len(expected) == STEPS + 2  # and two evaluations
    same(got, expected, exact)
    again = trained(enter(MODELS[name](), entry), name, tmp_path / "ours", resume=True, **more)
    same(again, expected, exact)


# accelerate


@every_model
@every_entry
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(name: str, entry: str, precision: str) -> None:
    from accelerate import Accelerator

    def run(way: str, dtype: torch.dtype = torch.float32) -> list[float]:
        torch.manual_seed(1)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = enter(MODELS[name]().to(dtype), way)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rows = DataLoader(rows_for(name), batch_size=4)  # type: ignore[arg-type]  # a list is a data set
        model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
        losses = []
        for batch in rows:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
        state = accelerator.get_state_dict(model)
        assert list(state) == list(MODELS[name]().state_dict())
        return losses

    same(run(entry), run("eager"), run("eager", torch.float64))  # autocast leaves float64 as it is


# Lightning


@every_model
@every_entry
def test_lightning(name: str, entry: str, tmp_path: Path) -> None:
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.losses: list[float] = []

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.losses.append(self.model(**batch).loss.item())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    def run(way: str, steps: int = STEPS, resume: str | None = None) -> list[float]:
        dtype = torch.float64 if way == "exact" else torch.float32
        module = Lit(enter(MODELS[name]().to(dtype), way))
        trainer = lightning.Trainer(
            max_steps=steps // 2, accumulate_grad_batches=2, gradient_clip_val=0.5, val_check_interval=4,
            limit_val_batches=2, num_sanity_val_steps=0, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        data = [DataLoader(rows_for(name, seed), batch_size=4) for seed in (0, 1)]  # type: ignore[arg-type]
        trainer.fit(module, *data, ckpt_path=resume and tmp_path / f"{resume}.ckpt", weights_only=False)
        trainer.save_checkpoint(tmp_path / f"{way}.ckpt")
        return module.losses

    ways = entry, "eager", "exact"
    same(*map(run, ways))
    keys = [torch.load(tmp_path / f"{way}.ckpt", weights_only=False)["state_dict"].keys() for way in (entry, "eager")]
    assert list(keys[0]) == list(keys[1])
    same(*(run(way, 2 * STEPS, way) for way in ways))


def test_a_copy_for_averaging_is_not_the_model() -> None:
    """As exponential moving averages are made."""
    model = enter(bert(), "prepare")
    average = copy.deepcopy(model)
    row = rows_for("bert")[0]["input_ids"][None]
    before = average(input_ids=row).logits.detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(average(input_ids=row).logits.detach(), before)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1)
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("generation_options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=str)
def test_generate_through_an_ortmodule(generation_options: dict[str, Any]) -> None:
    model = gpt2()
    tokens = torch.randint(2, 50, (2, 5))
    ours = ORTModule(model)
    ours(tokens, labels=tokens).loss.backward()
    sequences = []
    for each in (model, ours):
        torch.manual_seed(1)
        each.eval()
        mask = torch.ones_like(tokens)
        sequences.append(
            each.generate(tokens, attention_mask=mask, max_new_tokens=6, pad_token_id=1, **generation_options)
        )
    assert torch.equal(*sequences)


def test_save_pretrained_through_an_ortmodule(tmp_path: Path) -> None:
    ours, tokens = ORTModule(gpt2()), torch.randint(2, 50, (2, 5))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    ours(tokens, labels=tokens).loss.backward()
    optimizer.step()
    ours.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    state = ours.module.state_dict()
    assert loaded.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    ours.eval()
    with torch.no_grad():
        assert_matches(ours(tokens).logits, lambda model, tokens: model(tokens).logits, loaded.eval(), tokens)
