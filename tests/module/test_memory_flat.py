"""Steps with changing sizes leak no memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.observe.allocations import record
from tests.thinned import slow_except
from tests.zoo.checks import count_captures

WIDTH = 32
SIZES = [(1 + step * 7 % 8, 3 + step * 5 % 23) for step in range(25)]  # (rows, tokens), all different


def network() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.LayerNorm(WIDTH))


@pytest.mark.parametrize("early", slow_except([False, True], False), ids=["", "early-gradients"])
def test_a_step_frees_its_allocations(early: bool) -> None:
    model = ORTModule(network(), rng="torch", early_gradients=early)

    def step(rows: int, tokens: int) -> None:
        model(torch.ones(rows, tokens, WIDTH)).square().mean().backward()

    for sizes in SIZES[:3]:
        step(*sizes)  # compiles, and allocates the gradients that later steps accumulate
    captures = count_captures(model)
    recording = record(lambda: [step(*sizes) for sizes in SIZES[:10]])
    allocated = sum(one.bytes for one in recording.allocations if one.start is not None)
    left = [one for one in recording.allocations if one.start is not None and one.end is None]
    assert allocated > 10 * 4 * WIDTH * WIDTH
    assert not left
    assert count_captures(model) == captures


STEPS = """
import os, sys
import torch
from onnxtrain import ORTModule
from tests.module.test_memory_flat import SIZES, WIDTH, network

torch.set_num_threads(1)
model = ORTModule(network())
optimizer = torch.optim.AdamW(model.parameters())
held = []
for step in range(1000):
    rows, tokens = SIZES[step % len(SIZES)]
    model(torch.randn(rows, tokens, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("/proc/self/statm") as file:
        held.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
print(max(held[:500]), max(held[500:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_process_does_not_grow_in_a_thousand_steps() -> None:
    """In its own process, since other tests would count. Kernels are compiled in the first half, if at all."""
    environment = {
        **os.environ,
        "ONNXTRAIN_KERNELS": "pytorch",
        "ORTMODULE_ENABLE_TUNING": "0",
        "MALLOC_ARENA_MAX": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", STEPS],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    first, second = map(int, done.stdout.split())
    assert second - first <= 2**20, f"{(second - first) / 2**20:.1f} MiB more in the second half"
