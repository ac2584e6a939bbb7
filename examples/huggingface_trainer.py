"""Fine-tune a Hugging Face model with Trainer: prepare the model in place, and pass it to Trainer.

pip install '.[trainers]'
python -m examples.huggingface_trainer
"""

from __future__ import annotations

import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import onnxtrain

FIRST_WORD = 5  # below: padding and special tokens


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random padded sentences of different lengths; the label says whether a sentence contains the word 7."""

    def __init__(self, count: int, steps: int = 24) -> None:
        self.words = torch.randint(FIRST_WORD, 40, (count, steps))
        self.mask = torch.arange(steps) < torch.randint(8, steps + 1, (count, 1))
        self.words[torch.rand(count, steps) < 0.03] = 7
        self.words = self.words * self.mask

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": self.mask[index].long(), "labels": (words == 7).any().long()}


def main(steps: int = 150) -> list[float]:
    """Train; return the losses that Trainer logged."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=40, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_labels=2
    )
    model = BertForSequenceClassification(config)  # or .from_pretrained("...")
    onnxtrain.prepare(model)  # the only change: forward and backward now run as ONNX graphs
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=steps,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sentences(2000))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(onnxtrain.report_of(model))  # what was compiled

    model.save_pretrained(arguments.output_dir)  # the same files as without onnxtrain
    BertForSequenceClassification.from_pretrained(arguments.output_dir)
    return losses


if __name__ == "__main__":
    main()
