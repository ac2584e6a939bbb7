"""Fine-tunes MiniLM, eager PyTorch and onnxtrain side by side; shows a table and writes a page.

Usage: python -m examples.minilm [--quick] [--steps N] [--batch-size N] [--seed N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding

from benchmarks.machine import describe_machine
from examples.minilm.data import Batch, Corpus, Tokenizer, count_tokens, held_out_batches, load_corpus, training_batches
from examples.minilm.memory import peak_bytes
from examples.minilm.model import load_classifier, load_tokenizer
from examples.minilm.page import write_page
from examples.minilm.progress import Clock, Progress, as_minutes, make_progress
from examples.minilm.result import EAGER, NUDGED, ONNXTRAIN, Phase, Result
from examples.minilm.settings import FULL, QUICK, Settings
from examples.minilm.table import notes, terminal_table
from examples.minilm.training import Variant, nudge, train_interleaved
from onnxtrain import ORTModule
from onnxtrain.report import StageReport

_EVALUATION_UNITS = 0.4  # a batch of the held-out paragraphs costs about this share of a training step


class Run:
    """One run of the demonstration: its data, its start weights and its watcher."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.settings = settings
        self.progress = progress
        self.corpus: Corpus = load_corpus(seed=settings.seed, max_topics=settings.max_topics)
        tokenizer: Tokenizer = load_tokenizer()
        sizes = {"batch_size": settings.batch_size, "max_length": settings.max_length}
        steps = max(settings.training_steps, settings.exact_steps)
        self.batches = training_batches(self.corpus, tokenizer, steps=steps, seed=settings.seed, **sizes)
        self.held_out = held_out_batches(self.corpus, tokenizer, **sizes)
        self._start = load_classifier(self.corpus.topics, settings.seed)
        self.stages: tuple[StageReport, ...] = ()  # of the newest training program
        evaluations = 2 * len(self.held_out) * (1 + settings.evaluations)
        self.clock = Clock(2 * settings.training_steps + 3 * settings.exact_steps + _EVALUATION_UNITS * evaluations)

    def model(self) -> torch.nn.Module:
        """Return a copy of the start weights."""
        return copy.deepcopy(self._start)

    def warm_up(self) -> None:
        """Let PyTorch start its threads and fill its caches before the first step of any variant."""
        model = self.model().train()
        model(**self.batches[-1]).loss.backward()
        torch.optim.AdamW(model.parameters()).step()

    def train(self) -> tuple[Phase, tuple[StageReport, ...], tuple[int, int]]:
        """Train with default options; return the measurements, the pipeline's stages and the sizes at the peak."""
        settings = self.settings
        eager, ours = self._variants(settings.training_steps, rng=None)
        phase = Phase((eager.record, ours.record))
        self.progress.begin("Training with default options", phase.records, settings.training_steps)
        self.progress.doing("classifying the held-out paragraphs before training")
        # With eager for both: the weights are the same, and onnxtrain's first step is to be a training step.
        eager.evaluate(self.held_out)
        ours.record.evaluations.append(eager.record.evaluations[0])
        self.clock.spend(2 * len(self.held_out) * _EVALUATION_UNITS)
        self._train_interleaved((eager, ours), settings.training_steps, evaluated=True)
        largest = max(self.batches, key=count_tokens)
        self.progress.doing("measuring the peak memory of one step")
        for variant in (eager, ours):
            variant.record.peak_bytes = peak_bytes(variant.model, largest)
        rows, columns = largest["input_ids"].shape
        return phase, self.stages, (rows, columns)

    def compare(self) -> Phase:
        """Train with the same dropout masks, next to an eager copy whose weights differ in their last bit."""
        steps = self.settings.exact_steps
        eager, ours = self._variants(steps, rng="torch")
        nudged = Variant(NUDGED, nudge(self.model()), self.settings, steps)
        phase = Phase((eager.record, ours.record, nudged.record))
        self.progress.begin('Training with the same dropout masks, rng="torch"', phase.records, steps)
        self._train_interleaved((eager, ours, nudged), steps, evaluated=False)
        return phase

    def _variants(self, steps: int, rng: str | None) -> tuple[Variant, Variant]:
        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            return ORTModule(model) if rng is None else ORTModule(model, rng=rng)

        torch.manual_seed(self.settings.seed)
        eager = Variant(EAGER, self.model(), self.settings, steps)
        return eager, Variant(ONNXTRAIN, self.model(), self.settings, steps, wrap)

    def _train_interleaved(self, variants: Sequence[Variant], steps: int, *, evaluated: bool) -> None:
        def announce(variant: Variant) -> None:
            if isinstance(variant.model, ORTModule):
                self.progress.doing("onnxtrain captures and compiles the model in its first step")

        def keep_stages(variant: Variant) -> None:
            if isinstance(variant.model, ORTModule):  # now: later reports are of the program for evaluation
                self.stages = variant.model.report().stages

        def count() -> None:
            done = len(variants[0].record.steps)
            evaluations = len(self.held_out) if evaluated and done in evaluate_after else 0
            self.clock.spend(len(variants) * (1 + _EVALUATION_UNITS * evaluations))
            self.progress.update(self.clock.left_s())

        evaluate_after = self.settings.evaluate_after() if evaluated else frozenset()
        batches: list[Batch] = self.batches[:steps]
        train_interleaved(
            variants,
            batches,
            held_out=self.held_out,
            evaluate_after=evaluate_after,
            before_first_step=announce,
            after_first_step=keep_stages,
            after_step=count,
        )


def run(settings: Settings, progress: Progress, command: str) -> Result:
    """Run the demonstration."""
    started = time.perf_counter()
    machine = describe_machine()
    progress.say("Preparing Python's reference text and the pretrained MiniLM")
    this = Run(settings, progress)
    progress.say(
        f"  {len(this.corpus.topics)} topics, {len(this.corpus.train)} paragraphs to train on, "
        f"{len(this.corpus.held_out)} held out"
    )
    this.warm_up()
    training, stages, peak_batch = this.train()
    exact = this.compare()
    return Result(
        settings=settings,
        machine=machine,
        command=command,
        topics=this.corpus.topics,
        train_paragraphs=len(this.corpus.train),
        held_out_paragraphs=len(this.corpus.held_out),
        training=training,
        exact=exact,
        stages=stages,
        peak_batch=peak_batch,
        took_s=time.perf_counter() - started,
    )


def parse(arguments: Sequence[str]) -> tuple[Settings, Path]:
    """Return the settings and the folder for the page that a command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m examples.minilm", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer topics, shorter texts, fewer steps")
    parser.add_argument("--steps", type=int, help="training steps of each variant")
    parser.add_argument("--batch-size", type=int, help="paragraphs a step")
    parser.add_argument("--seed", type=int, help="of the split, the order, the new head and the dropout masks")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the page (%(default)s)")
    given = parser.parse_args(arguments)
    if given.steps is not None and given.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {given.steps}")
    asked = {"training_steps": given.steps, "batch_size": given.batch_size, "seed": given.seed}
    settings = QUICK if given.quick else FULL
    settings = dataclasses.replace(settings, **{k: v for k, v in asked.items() if v is not None})
    return dataclasses.replace(settings, exact_steps=min(settings.exact_steps, settings.training_steps)), given.out


def main(arguments: Sequence[str]) -> None:
    """Run the demonstration, print the table and write the page."""
    settings, folder = parse(arguments)
    console = Console()
    with make_progress(console) as progress:
        result = run(settings, progress, " ".join(("python -m examples.minilm", *arguments)))
    console.print(terminal_table(result))
    for note in notes(result):
        console.print(Padding(f"• {note}", (0, 0, 0, 1)), highlight=False, style="dim")
    page = write_page(result, folder)
    (folder / "result.json").write_text(json.dumps(result.as_json(), indent=1), encoding="utf-8")
    console.print(f"\nTook {as_minutes(result.took_s)} min. The page: {page.resolve().as_uri()}", soft_wrap=True)


if __name__ == "__main__":
    main(sys.argv[1:])
