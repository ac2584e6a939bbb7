"""Measure the time of a step under memory budgets: `python -m benchmarks.memory_budget minilm`.

    eager ─ eager + torch.utils.checkpoint per layer ─ torch.compile(activation_memory_budget) ─ onnxtrain at budgets

All variants are interleaved in one process. The results are the medians of the ratios to eager's time in the same
round, and the peaks of PyTorch's allocator in one step. onnxtrain runs with its default `rng="fast"`: with budgets as
fractions of the memory that it needs without one, and with the peaks of the other variants as budgets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from onnxtrain import ORTModule
from onnxtrain.errors import MemoryBudgetError
from onnxtrain.observe.allocations import peak_bytes, record

Step = Callable[[], object]
_WARM_UP = 6  # steps, in which kernels are chosen
_SHARES = (0.85, 0.7, 0.5)  # of the memory of a step that keeps all activations


def _minilm() -> tuple[Any, dict[str, torch.Tensor]]:
    config = BertConfig(
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        num_labels=20,
        vocab_size=8000,
        problem_type="single_label_classification",
    )
    tokens = torch.randint(10, 8000, (16, 128))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.randint(0, 20, (16,))}
    return BertForSequenceClassification(config), batch


def _words() -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 2000, (16, 128))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    config = GPT2Config(vocab_size=2000, n_embd=384, n_layer=6, n_head=12, n_positions=128, use_cache=False)
    return GPT2LMHeadModel(config), _words()


def _t5() -> tuple[Any, dict[str, torch.Tensor]]:
    config = T5Config(
        vocab_size=2000, d_model=384, d_kv=32, d_ff=1536, num_layers=3, num_heads=12, decoder_start_token_id=0,
        use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config), _words()


def _llama() -> tuple[Any, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        vocab_size=2000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=12,
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _words()


MODELS = {"minilm": _minilm, "gpt2": _gpt2, "t5": _t5, "llama": _llama}
CHECKPOINTS, COMPILED, OURS = "eager, a checkpoint per layer", "torch.compile, budget 0.5", "onnxtrain"


class Variants:
    """The variants of one model, each with its own copy and the same parameters.

    Attributes:
        steps: the function of a step, by title; each has run a few times.
        peaks: the peak bytes of a step, by title.
    """

    def __init__(self, name: str, with_compile: bool) -> None:
        self._make = MODELS[name]
        module, self._batch = self._make()
        self._state = module.state_dict()
        self.steps: dict[str, Step] = {}
        self.peaks: dict[str, int] = {}
        self._add("eager", lambda own: own)
        self._add(CHECKPOINTS, _checkpointed)
        if with_compile:
            self._add(COMPILED, _compiled(0.5))
        self._add(OURS, ORTModule)
        for share in _SHARES:
            self._add_within(f"{OURS}, budget {share}", share)
        for title, short in ((CHECKPOINTS, "the checkpoints"), (COMPILED, "torch.compile")):
            if title in self.peaks:
                self._add_within(f"{OURS}, in the bytes of {short}", self.peaks[title])

    def _add_within(self, title: str, budget: int | float) -> None:
        """Add a variant, unless it cannot meet its budget; then print the minimum."""
        try:
            self._add(title, lambda own: ORTModule(own, memory_budget_bytes=budget))
        except MemoryBudgetError as error:
            print(f"{title}: {error.expected}", flush=True)

    def _add(self, title: str, wrap: Callable[[Any], Any]) -> None:
        own, _ = self._make()
        own.load_state_dict(self._state)
        run = wrap(own.train())

        def step() -> None:
            run(**self._batch).loss.backward()

        for _ in range(_WARM_UP):
            step()
        self.peaks[title] = peak_bytes(record(step).allocations)
        self.steps[title] = step


def _checkpointed(own: Any) -> Any:
    own.gradient_checkpointing_enable({"use_reentrant": False})
    return own


def _compiled(share: float) -> Callable[[Any], Any]:
    def wrap(own: Any) -> Any:
        compiled = torch.compile(own)

        def run(**batch: torch.Tensor) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compiled(**batch)

        return run

    return wrap


@dataclass(frozen=True)
class Measured:
    """The results of one variant.

    Attributes:
        title: its name.
        time: the median ratio of its step time to eager's in the same round.
        peak: the peak memory of a step, relative to eager's.
        bytes: the peak memory of a step in bytes.
    """

    title: str
    time: float
    peak: float
    bytes: int


def measure(variants: Variants, rounds: int) -> list[Measured]:
    """Time all variants, interleaved."""
    times: dict[str, list[float]] = {title: [] for title in variants.steps}
    for _ in range(rounds):
        for title, step in variants.steps.items():
            start = time.perf_counter()
            step()
            times[title].append(time.perf_counter() - start)
    peaks = variants.peaks
    return [
        Measured(
            title,
            statistics.median(a / b for a, b in zip(took, times["eager"], strict=True)),
            peaks[title] / peaks["eager"],
            peaks[title],
        )
        for title, took in times.items()
    ]


def table(results: Sequence[Measured]) -> str:
    ours = next(r.time for r in results if r.title == OURS)
    rows = [
        f"| {r.title} | {r.time:.2f} | {r.time / ours:.2f} | {r.peak:.2f} | {r.bytes / 2**20:.0f} |" for r in results
    ]
    return "\n".join(["| | time / eager | time / onnxtrain | peak / eager | MiB |", f"|{'---|' * 5}", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_budget", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--compile", action="store_true", help="also measure torch.compile, which takes minutes to compile"
    )
    options = parser.parse_args()
    print(table(measure(Variants(options.model, options.compile), options.rounds)))


if __name__ == "__main__":
    main()
