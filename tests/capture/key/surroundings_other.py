"""A second Python module that the models of `surroundings_model` read from."""

import torch

FACTOR = 0.5
WITHIN = 0.25
AMONG = 1.0


class Settings:
    shift = 0.125


def function(x: torch.Tensor) -> torch.Tensor:
    return x * AMONG
