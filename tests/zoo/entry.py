"""An entry of the zoo: how to make a model, how to call it, and which of its sizes are static."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.device_under_test import device

SEQUENCES = ((3, 9), (1, 6), (2, 1))
BATCHES = ((3, 0), (1, 0), (7, 0))


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors among the arguments, with their names."""
        named = [*((f"argument {i}", a) for i, a in enumerate(self.args)), *self.kwargs.items()]
        return ((name, value) for name, value in named if isinstance(value, torch.Tensor))

    def to(self, dtype: torch.dtype) -> Call:
        """The same call on fresh tensors of the device under test, the floating ones of this dtype."""

        def moved(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(moved, value))
            if not isinstance(value, torch.Tensor):
                return value
            own = value.detach().clone().to(device())
            return own.to(dtype).requires_grad_(value.requires_grad) if own.is_floating_point() else own

        return Call(tuple(map(moved, self.args)), {k: moved(v) for k, v in self.kwargs.items()})


class Draw:
    """Sample inputs from a separate generator, so that the generator under test starts at the seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).requires_grad_(grad)

    def ints(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator)


def ragged_mask(batch: int, length: int) -> torch.Tensor:
    """1 for tokens, 0 for padding at the end: row i is i tokens short, and none is empty."""
    lengths = (length - torch.arange(batch)).clamp(min=1)
    return (torch.arange(length) < lengths[:, None]).long()


def own_loss(output: Any) -> torch.Tensor:
    """The loss computed by the model itself."""
    loss: torch.Tensor = output.loss if hasattr(output, "loss") else output["loss"]
    return loss


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Convert bfloat16 to float32; leave wider dtypes unchanged."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def mean_square(output: Any) -> torch.Tensor:
    """A loss for a model that returns one tensor."""
    assert isinstance(output, torch.Tensor)
    return wide(output).square().mean()


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: how tests call it.
        make: builds it, small; its random initial values follow torch's default generator.
        call: (draw, batch, length) -> the arguments of a call.
        loss: from the output to a scalar.
        sizes: (batch, length) of the calls that one capture must serve.
        falls_back: what the warning says where the model runs in PyTorch instead; None where it must be captured.
    """

    name: str
    make: Callable[[], torch.nn.Module]
    call: Callable[[Draw, int, int], Call]
    loss: Callable[[Any], torch.Tensor] = own_loss
    sizes: tuple[tuple[int, int], ...] = SEQUENCES
    falls_back: str | None = None

    def __str__(self) -> str:
        return self.name

    def build(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The model in train mode on the device under test, with the same initial values in every call and dtype."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return self.make().to(device(), dtype).train()

    def arguments(self, batch: int, length: int) -> Call:
        """The arguments of a call, the same ones every time."""
        return self.call(Draw(1000 * batch + length), batch, length)
