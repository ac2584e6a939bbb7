"""Training with dropout: skipping work changes which masks are sampled, and nothing else that statistics show."""

from __future__ import annotations

import statistics

import pytest
import torch
import transformers

from onnxtrain import ORTModule

STEPS, RUNS, VOCABULARY, LENGTH = 200, 4, 40, 24


def curve(seed: int, skip_padding: str) -> list[float]:
    """The losses of a small masked language model on padded batches that repeat, so that it learns."""
    torch.manual_seed(7)
    size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    module = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=VOCABULARY, **size)).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    model = ORTModule(module, skip_padding=skip_padding, keep_outputs=("loss",))
    torch.manual_seed(seed)  # of the dropout masks alone: the batches have a generator of their own
    generator, losses = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        start = torch.randint(0, VOCABULARY, (8, 1), generator=generator)
        words = (start + torch.arange(LENGTH)) % VOCABULARY
        mask = (torch.arange(LENGTH) < torch.randint(4, LENGTH, (8, 1), generator=generator)).long()
        labels = words.masked_fill((torch.rand(8, LENGTH, generator=generator) > 0.5) | (mask == 0), -100)
        labels[0, 0] = words[0, 0]
        loss = model(input_ids=words, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_loss_curves_with_dropout_are_statistically_the_same() -> None:
    """Means over the last 50 of 200 steps: with padding and without differ by no more than runs of one kind do."""
    ends = {
        skip_padding: [statistics.mean(curve(seed, skip_padding)[-50:]) for seed in range(RUNS)]
        for skip_padding in ("never", "always")
    }
    starts = [curve(0, skip_padding)[0] for skip_padding in ends]
    assert abs(starts[0] - starts[1]) < 0.2
    spread = max(map(statistics.stdev, ends.values()))
    assert max(map(max, ends.values())) < 0.8 * starts[0], "nothing was learned: the test compares noise"
    # Four standard errors of the difference of two means.
    assert abs(statistics.mean(ends["never"]) - statistics.mean(ends["always"])) < 4 * spread * (2 / RUNS) ** 0.5
