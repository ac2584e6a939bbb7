"""Time of a step against the memory that it may take: `python -m benchmarks.memory_budget minilm`.

    eager ─ eager + torch.utils.checkpoint per layer ─ torch.compile(activation_memory_budget) ─ onnxtrain at budgets

All take turns in one process; shown are the medians of each one's times over eager's in the same round, and the peaks
that PyTorch's allocator saw in one step. onnxtrain runs with `rng="fast"`, as it does by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

from onnxtrain import ORTModule
from onnxtrain.errors import MemoryBudgetError
from onnxtrain.observe.allocations import peak_bytes, record

Step = Callable[[], object]
_SHARES = (0.8, 0.65, 0.5, 0.4)


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


def _gpt2() -> tuple[Any, dict[str, torch.Tensor]]:
    config = GPT2Config(vocab_size=2000, n_embd=384, n_layer=6, n_head=12, n_positions=128, use_cache=False)
    tokens = torch.randint(0, 2000, (16, 128))
    return GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens.clone()}


MODELS = {"minilm": _minilm, "gpt2": _gpt2}


def contenders(name: str, with_compile: bool) -> dict[str, Step]:
    """A step of each, on models of their own with the same parameters."""
    module, batch = MODELS[name]()
    state = module.state_dict()

    def step_of(wrap: Callable[[Any], Any]) -> Step:
        own, _ = MODELS[name]()
        own.load_state_dict(state)
        run = wrap(own.train())

        def step() -> None:
            run(**batch).loss.backward()

        return step

    def checkpointed(own: Any) -> Any:
        own.gradient_checkpointing_enable({"use_reentrant": False})
        return own

    found = {"eager": step_of(lambda own: own), "eager, a checkpoint per layer": step_of(checkpointed)}
    if with_compile:
        for share in (1.0, 0.5):
            found[f"torch.compile, activation_memory_budget {share}"] = step_of(_compiled(share))
    found["onnxtrain"] = step_of(ORTModule)
    for share in _SHARES:
        found[f"onnxtrain, budget {share}"] = step_of(
            lambda own, share=share: ORTModule(own, memory_budget_bytes=share)  # type: ignore[misc]
        )
    return found


def _compiled(share: float) -> Callable[[Any], Any]:
    def wrap(own: Any) -> Any:
        compiled = torch.compile(own)

        def run(**batch: torch.Tensor) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compiled(**batch)

        return run

    return wrap


def measure(steps: dict[str, Step], rounds: int) -> None:
    """Prints a table."""
    for title, step in list(steps.items()):
        try:
            for _ in range(4):
                step()
        except MemoryBudgetError as error:
            print(f"{title}: {error.expected}", flush=True)
            del steps[title]
    times: dict[str, list[float]] = {title: [] for title in steps}
    for _ in range(rounds):
        for title, step in steps.items():
            start = time.perf_counter()
            step()
            times[title].append(time.perf_counter() - start)
    peaks = {title: peak_bytes(record(step).allocations) for title, step in steps.items()}
    print(f"| | time / eager | peak / eager | MiB |\n|{'---|' * 4}")
    for title, took in times.items():
        ratio = statistics.median(a / b for a, b in zip(took, times["eager"], strict=True))
        share = peaks[title] / peaks["eager"]
        print(f"| {title} | {ratio:.2f} | {share:.2f} | {peaks[title] / 2**20:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_budget", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="torch.compile too: its kernels take minutes to build")
    options = parser.parse_args()
    measure(contenders(options.model, options.compile), options.rounds)


if __name__ == "__main__":
    main()
