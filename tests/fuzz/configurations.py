"""Configurations of a program: disabled passes, recompute, whole or by block, captures from disk, eval mode."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxtrain.passes import FORWARD, JOINT

PASSES = tuple(dict.fromkeys(run.__name__ for run in (*FORWARD, *JOINT)))


@dataclass(frozen=True)
class Configuration:
    """One way to run a program.

    Attributes:
        options: those of ORTModule beside `rng="torch"`.
        entry: "module" for ORTModule, "prepare" for the model in place, "regional" for a graph of each block.
        cached: whether the program runs a second time from a capture on the disk.
        evaluates: whether a call in eval mode without gradients comes between the steps.
        one_gradient: whether only one output gets a gradient in the second step.
        regions: whether the second step runs fused regions, by a made-up compiler (`regions.py`).
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    entry: str = "module"
    cached: bool = False
    evaluates: bool = False
    one_gradient: bool = False
    regions: bool = False

    def simpler(self) -> list[Configuration]:
        """Configurations that differ less from the default, for shrinking a program."""
        default = Configuration()
        candidates = [
            Configuration(**{**vars(self), name: value})
            for name, value in vars(default).items()
            if vars(self)[name] != value
        ]
        candidates += [
            Configuration(**{**vars(self), "options": {k: v for k, v in self.options.items() if k != name}})
            for name in self.options
        ]
        return candidates


_RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "layers"},
    {"recompute": "all"},
    {"recompute": "layers", "early_gradients": True},
    {"memory_budget_bytes": 0.7},
    {"memory_budget_bytes": 0.9},
    {"memory_budget_bytes": 0.9, "recompute": "none"},
    {"memory_budget_bytes": 0.8, "early_gradients": True},
    {"memory_budget_bytes": 1 << 14},
)


_LESS_WORK = (
    ("skip_ignored_labels", "hoist_gathers", "chunk_losses"),
    ("skip_ignored_labels",),
    ("chunk_losses",),
)

_KINDS = {
    "default": 50,
    "pass": 45,
    "some passes": 15,
    "passes": 10,
    "compute": 10,
    "recompute": 30,
    "padding": 10,
    "early": 10,
    "entry": 20,
    "cached": 10,
    "fast": 10,
    "regions": 10,
}


def draw(rng: random.Random) -> Configuration:
    """A configuration: in a quarter of the cases the default."""
    kind = rng.choices([*_KINDS], [*_KINDS.values()])[0]
    options: dict[str, Any] = {}
    entry = "module"
    if kind == "pass":
        options["disabled_passes"] = (rng.choice(PASSES),)
    elif kind == "some passes":
        options["disabled_passes"] = tuple(rng.sample(PASSES, rng.randint(2, len(PASSES) - 1)))
    elif kind == "passes":
        options["disabled_passes"] = PASSES
    elif kind == "compute":
        options |= {"disabled_passes": rng.choice(_LESS_WORK)}
    elif kind == "recompute":
        options |= rng.choice(_RECOMPUTE)
        if rng.random() < 0.3:
            options["disabled_passes"] = PASSES
    elif kind == "padding":
        options["skip_padding"] = rng.choice(["always", "never"])
    elif kind == "early":
        options["early_gradients"] = True
    elif kind == "entry":
        entry = rng.choice(["prepare", "regional"])
    elif kind == "fast":
        options["rng"] = "fast"
    elif kind == "regions":
        options |= {"rng": "fast", "kernels": "fused-all"}  # of the exact generator none are fused
    evaluates, one_gradient = rng.random() < 0.1, rng.random() < 0.15
    return Configuration(options, entry, kind == "cached", evaluates, one_gradient, kind == "regions")
