"""The memory that the recordings of a module share: which of them may be replayed, and how large it gets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from onnxtrain.execute.recorded_program import CALLS
from onnxtrain.frontend.prepare import prepare
from tests.execute.cpu_recorder import Recorders, Trained
from tests.execute.test_recorded_program import small, small_step
from tests.execute.test_recorded_results import calls_in_any_order


def blocks(log: Recorders) -> Trained:
    torch.manual_seed(1)
    equal = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    module = nn.Sequential(nn.Sequential(*equal)).double()
    return Trained(prepare(module, regional=True, rng="torch", cuda_graphs=True), log)


def train(model: nn.Module, sizes: Sequence[int], steps: int = CALLS + 2) -> list[torch.Tensor]:
    """Steps of each number of rows; nothing but the last gradients outlives a step."""
    for number in range(steps * len(sizes)):
        model.zero_grad()
        small_step(model, number, sizes[number % len(sizes)])
    return []


@pytest.mark.parametrize("make", [small, blocks])
def test_all_sizes_share_the_memory_of_the_largest(log: Recorders, make: type[Trained]) -> None:
    """Also if they were recorded first; and all blocks share one pool."""
    used = []
    for sizes in ((64,), (16, 64, 48)):
        first = len(log.pools)
        trained = make(log)
        trained.both(lambda model, sizes=sizes: train(model, sizes))
        assert log.since()[1] == 2 * len(sizes) * 2 * (3 if make is blocks else 1)
        pools = log.pools[first:]
        assert len(pools) == 1
        used.append(pools[0].nbytes())
    alone, shared = used
    assert shared < 1.6 * alone  # 128 of 64 rows; a block of memory is not joined with the next one


def test_a_result_that_is_alive_is_not_overwritten_by_other_sizes(log: Recorders) -> None:
    """The recording of the other sizes was made in its memory: these get one with memory of their own."""
    trained = small(log)

    def hold(model: nn.Module) -> list[torch.Tensor]:
        train(model, (3, 5))
        model.zero_grad()
        held = model(torch.ones(3, 4, dtype=torch.float64, requires_grad=True))
        train(model, (5,), steps=2)
        return [held]

    trained.both(hold)
    assert log.since() == (2 * 2 + 2, 2 * 2 * 2 + 1 + 2 * 2)


def test_gradients_that_are_alive_during_forward_are_not_overwritten(log: Recorders) -> None:
    """Forward was recorded before backward, so that gradients may be in its temporary memory."""
    trained = small(log)

    def late_zero_grad(model: nn.Module) -> list[torch.Tensor]:
        seen = []
        for number in range(CALLS + 6):
            y = model(torch.full((3, 4), float(number), dtype=torch.float64)).square().mean()
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
            y.backward()
        return seen

    trained.both(late_zero_grad)
    records, plays = log.since()
    assert records == 4
    assert plays == 2 * 6
    assert not any(m.is_copied for recording in log.recordings() for m in recording.memories)


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_several_sizes_in_any_order(log: Recorders, seed: int) -> None:
    trained = small(log)
    trained.both(lambda model: calls_in_any_order(model, seed, count=150, rows=(2, 3, 5)))
    assert log.since()[1] > 30
