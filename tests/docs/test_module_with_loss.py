"""The Trainer of docs/how-to/module-with-loss.md trains as transformers' own with label smoothing."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "module-with-loss.md"


@pytest.mark.slow
def test_the_trainer_of_the_page_trains_from_end_to_end(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

    namespace: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)[:2]:
        exec(block, namespace)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    rows = []
    for _ in range(24):
        ids = torch.randint(50, (8,))
        rows.append({"input_ids": ids, "labels": torch.where(torch.rand(8) < 0.3, ids, -100)})
    losses = {}
    kinds = {"graph": (namespace["GraphTrainer"], torch.float32), "eager": (Trainer, torch.float32)}
    for kind, (trainer_class, dtype) in {**kinds, "exact": (Trainer, torch.float64)}.items():
        arguments = TrainingArguments(
            output_dir=str(tmp_path / kind),
            per_device_train_batch_size=4,
            max_steps=6,
            learning_rate=1e-2,
            label_smoothing_factor=0.1,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            max_grad_norm=0.0,
        )
        trainer = trainer_class(copy.deepcopy(model).to(dtype), arguments, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        history = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses[kind] = torch.tensor([*history, trainer.evaluate()["eval_loss"]], dtype=dtype)
        if kind == "graph":
            assert engine_of(trainer.with_loss).captures >= 2, "of training and of evaluation"
    assert losses["graph"][5] < losses["graph"][0]
    assert_no_worse_than_eager("losses", losses["graph"], losses["eager"], losses["exact"])
