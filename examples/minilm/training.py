"""Train variants on the same batches, interleaved, and measure each step.

    batch ─▶ save the generator's state ─▶ step of A ─▶ restore ─▶ step of B ─▶ next batch, B first

Every variant starts a step from the same generator state: one that samples as eager PyTorch does gets the same dropout
masks. Who goes first changes with every batch, so that none has the warmer cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from examples.minilm.data import Batch, count_tokens
from examples.minilm.result import Evaluation, Record, Step
from examples.minilm.settings import Settings


class Variant:
    """A model with its own optimizer, and the record of what it did."""

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        settings: Settings,
        steps: int,
        wrap: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    ) -> None:
        self.record = Record(name)
        started = time.perf_counter()
        model.train()
        self.model = model if wrap is None else wrap(model)
        self.record.wrap_s = time.perf_counter() - started
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)
        warm_up = settings.warm_up_steps
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min((step + 1) / warm_up, 1.0) * (1.0 - step / steps)
        )

    def step(self, batch: Batch) -> None:
        """One training step, written as anyone writes it: the same lines for every variant."""
        started = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        took_s = time.perf_counter() - started
        self.record.steps.append(Step(loss.item(), took_s, count_tokens(batch)))

    def evaluate(self, batches: Sequence[Batch]) -> None:
        """Classify the held-out paragraphs."""
        loss, right, total = 0.0, 0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                labels = batch["labels"]
                output = self.model(**batch)
                loss += float(output.loss) * len(labels)
                right += int((output.logits.argmax(dim=1) == labels).sum())
                total += len(labels)
        self.model.train()
        self.record.evaluations.append(Evaluation(len(self.record.steps), loss / total, right / total))


def train_interleaved(
    variants: Sequence[Variant],
    batches: Sequence[Batch],
    *,
    held_out: Sequence[Batch] = (),
    evaluate_after: frozenset[int] = frozenset(),
    before_first_step: Callable[[Variant], None] = lambda variant: None,
    after_first_step: Callable[[Variant], None] = lambda variant: None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Feed each batch to every variant; the generator continues from its state after the first variant of the list."""
    for number, batch in enumerate(batches):
        before = torch.get_rng_state()
        after = before
        first = number % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            if number == 0:
                before_first_step(variant)
            torch.set_rng_state(before)
            variant.step(batch)
            if number == 0:
                after_first_step(variant)
            if variant is variants[0]:
                after = torch.get_rng_state()
        torch.set_rng_state(after)
        if number + 1 in evaluate_after:
            for variant in variants:
                variant.evaluate(held_out)
        after_step()


def nudge(model: torch.nn.Module) -> torch.nn.Module:
    """Move every weight to the next float32 number, the smallest possible change."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.nextafter(parameter, torch.full_like(parameter, torch.inf)))
    return model
