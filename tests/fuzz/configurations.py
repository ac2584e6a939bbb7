"""The ways in which a program is run: passes off, recompute, whole or by block, captures from the disk, eval."""

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
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    entry: str = "module"
    cached: bool = False
    evaluates: bool = False
    one_gradient: bool = False

    def simpler(self) -> list[Configuration]:
        """This one with one thing less, for those that shrink a program."""
        default = Configuration()
        found = [
            Configuration(**{**vars(self), name: value})
            for name, value in vars(default).items()
            if vars(self)[name] != value
        ]
        found += [
            Configuration(**{**vars(self), "options": {k: v for k, v in self.options.items() if k != name}})
            for name in self.options
        ]
        return found


def draw(rng: random.Random) -> Configuration:
    """A configuration: in a quarter of the cases the default."""
    kind = rng.choices(
        ["default", "pass", "passes", "compute", "recompute", "padding", "early", "entry", "cached"],
        [5, 6, 1, 1, 3, 1, 1, 2, 1],
    )[0]
    options: dict[str, Any] = {}
    entry = "module"
    if kind == "pass":
        options["disabled_passes"] = (rng.choice(PASSES),)
    elif kind == "passes":
        options["disabled_passes"] = PASSES
    elif kind == "compute":
        options["compute_optimizer"] = False
    elif kind == "recompute":
        name, value = rng.choice(
            [
                ("recompute_cheap", False),
                ("memory_opt_level", 1),
                ("memory_opt_level", 2),
                ("memory_budget_bytes", 0.5),
                ("memory_budget_bytes", 0.8),
                ("memory_budget_bytes", 1 << 16),
            ]
        )
        options[name] = value
    elif kind == "padding":
        options["skip_padding"] = rng.choice(["always", "never"])
    elif kind == "early":
        options["early_gradients"] = True
    elif kind == "entry":
        entry = rng.choice(["prepare", "regional"])
    return Configuration(options, entry, kind == "cached", rng.random() < 0.1, rng.random() < 0.15)
