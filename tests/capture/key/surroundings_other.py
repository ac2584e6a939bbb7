"""Another module from which `surroundings_model` reads."""

import torch

FACTOR = 0.5
WITHIN = 0.25
AMONG = 1.0


class Settings:
    shift = 0.125


def function(x: torch.Tensor) -> torch.Tensor:
    return x * AMONG
