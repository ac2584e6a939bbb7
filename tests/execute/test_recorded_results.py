"""Results in the memory of recordings: neither copied nor overwritten while anything shares it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.recorded_program import CALLS, MAX_RECORDINGS, Recording
from onnxtrain.execute.recorded_results import ResultMemory
from onnxtrain.frontend.prepare import prepare
from onnxtrain.testing import assert_no_worse_than_eager
from tests.execute.cpu_recorder import Recorders
from tests.execute.test_recorded_program import small, small_step


def recordings_of(log: Recorders) -> tuple[Recording, Recording]:
    """The recordings of forward and backward, if there are no others."""
    forward, backward = log.recordings()
    return forward, backward


def test_saved_values_are_read_without_a_copy(log: Recorders) -> None:
    """No copies but those of the batch, of the cotangent, and of the result that the loop holds."""
    trained = small(log)

    def train(model: nn.Module) -> list[torch.Tensor]:
        addresses = set()
        for number in range(CALLS + 5):
            model.zero_grad()
            y = model(torch.full((3, 4), float(number), dtype=torch.float64))  # the last y is alive during the call
            y.sum().backward()
            addresses.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
        assert log.busy or len(addresses) <= CALLS + 1
        return [y]

    trained.both(train)
    assert log.since() == (2, 10)
    forward, backward = recordings_of(log)
    assert [m.results for m in forward.memories if m.is_copied] == [{0}]
    assert not any(m.is_copied for m in backward.memories)
    kept = {m.template.data_ptr() for m in forward.memories if not m.is_copied}
    assert kept
    assert kept <= set(backward.addresses)
    assert [t.shape for t in (*forward.inputs, *backward.inputs)] == [(3, 4), (3, 4), (3, 4)]


def test_blocks_read_each_others_results_where_they_are(log: Recorders) -> None:
    """The first call compiles; what the compilation still holds at the second call is not taken for the user's."""
    blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3))
    module = nn.Sequential(nn.Sequential(*blocks)).double()
    model = prepare(module, regional=True, rng="torch", cuda_graphs=True)
    for number in range(CALLS + 2):
        model.zero_grad()
        loss = model(torch.full((3, 4), float(number), dtype=torch.float64)).square().sum()
        loss.backward()
        del loss
    assert log.since() == (6, 12)
    assert not any(m.is_copied for recording in log.recordings() for m in recording.memories)
    # The batch, which the first block reads twice, and the cotangent that PyTorch computes.
    assert sum(len(recording.inputs) for recording in log.recordings()) == 3


def test_results_kept_from_some_call_on_are_copied_from_then_on(log: Recorders) -> None:
    trained = small(log)

    def train(model: nn.Module) -> list[torch.Tensor]:
        kept = []
        for number in range(CALLS + 8):
            y, dx = small_step(model, number)
            if number > CALLS + 2:
                kept += [y, dx, *(p.grad for p in model.parameters() if p.grad is not None)]
            del y, dx
            model.zero_grad()
        return kept

    trained.both(train)
    assert log.since() == (4, 16)
    assert all(m.is_copied for m in log.recordings()[1].memories)


def test_a_program_has_few_recordings_of_the_same_sizes(log: Recorders) -> None:
    """More forwards than that before a backward: the others run the ordinary program."""
    trained = small(log)

    def train(model: nn.Module) -> list[torch.Tensor]:
        results = []
        for _ in range(3):
            xs = [torch.full((3, 4), float(i), dtype=torch.float64, requires_grad=True) for i in range(6)]
            ys = [model(x) for x in xs]
            for x, y in zip(xs, ys, strict=True):
                y.sum().backward()
                assert x.grad is not None
                results.append(x.grad)
        return results

    trained.both(train)
    assert len(log.recordings()) <= 2 * MAX_RECORDINGS
    assert log.since()[1] > 12


@pytest.mark.parametrize("seed", range(3))
def test_calls_in_any_order(log: Recorders, seed: int) -> None:
    trained = small(log)
    trained.both(lambda model: calls_in_any_order(model, seed))
    assert log.since()[1] > 10


def calls_in_any_order(
    model: nn.Module, seed: int, device: str = "cpu", count: int = 60, rows: Sequence[int] = (3,)
) -> list[torch.Tensor]:
    """Forwards, backwards and evaluations in a random order; results and gradients are dropped or kept."""
    choice = random.Random(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(choice.choice(rows), 4, generator=generator, dtype=torch.float64).to(device)
        action = choice.choice(["forward", "forward", "backward", "backward", "twice", "evaluate", "drop", "step"])
        if action == "forward" and len(pending) < 5:
            pending.append(model(x.requires_grad_()).square().mean())
        elif action in ("backward", "twice") and pending:
            loss = pending.pop(choice.randrange(len(pending)))
            loss.backward(retain_graph=action == "twice")
            if action == "twice":
                (loss * 3).backward()
        elif action == "evaluate":
            with torch.no_grad():
                kept.append(model.eval()(x))
            model.train()
            if choice.random() < 0.7:
                kept.pop()
        elif action == "drop":
            kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            kept += [p.grad for p in model.parameters() if p.grad is not None and choice.random() < 0.2]
            optimizer.zero_grad(set_to_none=choice.random() < 0.7)
        elif action == "step" and not pending:
            optimizer.step()
    return [t.clone() for t in kept]


def test_without_counts_of_references_everything_is_copied(log: Recorders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxtrain.execute.recorded_results.storage_use_count", None)
    trained = small(log)
    trained.both(lambda model: [t for number in range(CALLS + 2) for t in small_step(model, number)])
    assert log.since() == (2, 4)
    assert all(m.is_copied for recording in log.recordings() for m in recording.memories)


@pytest.mark.parametrize(
    "holder",
    [
        lambda t: t,
        lambda t: t[:1],
        lambda t: t.detach(),
        lambda t: t.untyped_storage(),
        lambda t: t.numpy(),
        nn.Parameter,
        lambda t: (t.requires_grad_() * t).grad_fn,
    ],
)
def test_a_result_is_alive_as_long_as_anything_shares_its_memory(holder: Callable[[torch.Tensor], object]) -> None:
    memory = ResultMemory(torch.ones(3), [0], is_copied=False)
    assert not memory.is_alive()
    held = holder(memory.returned())
    assert memory.is_alive()
    del held
    assert not memory.is_alive()


def test_each_replay_has_a_version_counter() -> None:
    memory = ResultMemory(torch.ones(3), [0], is_copied=False)
    first = memory.returned().add_(1)
    assert first._version == 1
    assert memory.returned()._version == 0
    assert first.data_ptr() == memory.returned().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order_on_a_gpu(seed: int) -> None:
    eager = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)).cuda().double()
    model = ORTModule(copy.deepcopy(eager), rng="torch", cuda_graphs=True)
    rows = (3, 5, 64) if seed % 2 else (3,)
    results = calls_in_any_order(model, seed, "cuda", 200, rows)
    for got, expected in zip(results, calls_in_any_order(eager, seed, "cuda", 200, rows), strict=True):
        assert_no_worse_than_eager("result", got, expected, expected)


@pytest.mark.gpu
def test_a_step_on_a_gpu_returns_gradients_where_they_are() -> None:
    """It neither waits for the GPU nor allocates what forward keeps: eight activations."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))).cuda()
    model, x = ORTModule(module, rng="torch", cuda_graphs=True), torch.randn(4096, 256, device="cuda")
    addresses = []
    for number in range(CALLS + 4):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if number > CALLS + 1 else "default")
        try:
            model(x).square().mean().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        grown = torch.cuda.max_memory_allocated() - before
        addresses.append([p.grad.data_ptr() for p in module.parameters() if p.grad is not None])
    assert addresses[-1] == addresses[-2]
    assert grown < 5 * x.nbytes
