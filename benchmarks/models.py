"""The models of the benchmark and their batches.

Dropout has the default of each architecture (0.1 for BERT, GPT-2 and T5; none for Llama and ViT).
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

_VOCABULARY = 8000
_IGNORED = -100  # the label of tokens without a loss


def minilm() -> nn.Module:
    """Return a classifier of MiniLM's size, with random weights."""
    config = transformers.BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=20,
        problem_type="single_label_classification",  # else the first forward writes it into the config
    )
    return transformers.BertForSequenceClassification(config)


def bert_masked() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024
    )
    return transformers.BertForMaskedLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=256, n_layer=4, n_head=8, vocab_size=_VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=688,
        vocab_size=_VOCABULARY,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_heads=8,
        vocab_size=_VOCABULARY,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=64,
        patch_size=8,
        num_labels=10,
        problem_type="single_label_classification",
    )
    return transformers.ViTForImageClassification(config)


class _Block(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def cnn() -> nn.Module:
    """Three residual blocks of 32, 64 and 128 channels."""
    start = (nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    blocks = (_Block(32, 32, 1), _Block(32, 64, 2), _Block(64, 128, 2))
    return nn.Sequential(*start, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class _LastOfLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(256, 256, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(x)
        logits: torch.Tensor = self.head(outputs[:, -1])
        return logits


def lstm() -> nn.Module:
    return _LastOfLstm()


def mlp(width: int, layers: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    parts: list[nn.Module] = [nn.Linear(width, width)]
    for _ in range(layers - 1):
        parts += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*parts)


def classified_tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Sequences without padding, each with one of 20 labels."""
    tokens = torch.randint(1000, 30000, (rows, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.randint(0, 20, (rows,))}


def masked_tokens(rows: int, length: int, vocabulary: int = 30000) -> dict[str, torch.Tensor]:
    """Sequences with labels for 15 % of the tokens."""
    tokens = torch.randint(1, vocabulary, (rows, length))
    labels = tokens.masked_fill(torch.rand(rows, length) >= 0.15, _IGNORED)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def next_tokens(rows: int, length: int, vocabulary: int = _VOCABULARY) -> dict[str, torch.Tensor]:
    """Sequences that are their own labels."""
    tokens = torch.randint(1, vocabulary, (rows, length))
    return {"input_ids": tokens, "labels": tokens}


def classified_images(count: int, size: int, name: str) -> dict[str, torch.Tensor]:
    """Images of three channels under this name, each with one of 10 labels."""
    return {name: torch.randn(count, 3, size, size), "labels": torch.randint(0, 10, (count,))}
