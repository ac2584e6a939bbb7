"""Plans of a step on many ranks: the events of real processes, and the times of the model."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from onnxtrain.cli import USAGE, main
from onnxtrain.distributed.scale_plan import Machine, Sharding, mesh_of, record_fake_step, record_step, simulate
from onnxtrain.distributed.step_recorder import ALL_REDUCE, GATHER, REDUCE_SCATTER, WAIT, Event
from onnxtrain.observe.memory_timeline import BANDS
from tests.module.test_prepare import WIDTH, Tower

ROWS = 8
SHARDINGS = {
    2: [Sharding(1, 2), Sharding(1, 2, torch.bfloat16, recompute=True)],
    4: [Sharding(1, 4), Sharding(2, 2)],
}
HELD = (100, 0, 0, 0, 0)


def planned(sharding: Sharding) -> list[Event]:
    with torch.device("meta"):
        tower, x = Tower(), torch.randn(ROWS, WIDTH)
    return record_fake_step(tower, lambda x: tower(x).square().mean(), x, sharding)


def padded(module: torch.nn.Module) -> int:
    """The bytes of the parameters, with dimension 0 padded to a multiple of 4 ranks."""
    return sum(-(-len(p) // 4) * 4 * p[0].numel() for p in module.parameters()) * 4


def test_a_plan_counts_what_fsdp_sends() -> None:
    """Each block is gathered in forward and, but for the last, in backward, where its gradient is reduced."""
    tower = Tower()
    blocks, root = [padded(block) for block in tower.blocks], padded(tower.head)
    plan = simulate(planned(Sharding(2, 4)), Machine(1e12, 1e9))
    gathers = plan.collectives(GATHER)
    assert [e.phase for e in gathers].count("forward") == len(blocks) + 1
    for kind, ranks in ((GATHER, 4), (REDUCE_SCATTER, 4), (ALL_REDUCE, 2)):
        assert {e.ranks for e in plan.collectives(kind)} == {ranks}
    reduced = sorted(e.bytes for e in plan.collectives(REDUCE_SCATTER))
    assert reduced == sorted([*blocks, root])
    assert sum(e.sent for e in plan.collectives(REDUCE_SCATTER)) == sum(reduced) * 3 // 4
    assert sum(e.sent for e in plan.collectives(ALL_REDUCE)) == sum(reduced) // 4  # of the shards, there and back
    assert plan.timeline.peak.bytes_by_band[BANDS.index("parameters")] == sum(reduced) // 4


def test_times_overlap_as_fsdp_prefetches() -> None:
    """The second gather runs beside the first computation; the reduction beside the last one."""
    forward: list[Event] = []
    for _ in range(2):
        gather = Event(GATHER, "forward", HELD, bytes=200, ranks=2)  # sends 100: 1 s
        forward += [gather, Event(WAIT, "forward", HELD), Event("compute", "forward", HELD, flops=30)]  # 3 s
    backward = [
        Event(REDUCE_SCATTER, "backward", HELD, bytes=400, ranks=2),  # 2 s
        Event("compute", "backward", HELD, flops=10),
    ]
    plan = simulate([*forward, *backward], Machine(flops=10, link=100, latency=0), state=200)
    assert (plan.compute, plan.communication) == (7, 4)
    assert plan.step == 9  # 1 gather, 6 of forward, and 2 of the reduction, beside 1 of computation
    assert plan.exposed == 2
    assert plan.timeline.peak.bytes_by_band == (100, 200, 0, 0, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom tests.module.test_prepare import WIDTH, Tower\n"
        "def build():\n    return Tower(), torch.randn(4, WIDTH)\n"
    )
    words = ["plan-scale", f"{tmp_path / 'net.py'}:build", "--world", "16", "--shard", "2x8", "--link", "100GB"]
    assert main([*words, "--html", str(tmp_path / "plan.html")]) == 0
    assert "all-gather" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert main([*words[:4], "--shard", "3x8"]) == USAGE
    assert not dist.is_initialized()


def compare(recorded: list[Event], expected: list[Event]) -> None:
    """All is equal, but that gloo's threads hold the buffer of one reduction for a while."""
    assert [replace(e, held=HELD) for e in recorded] == [replace(e, held=HELD) for e in expected]
    largest = max(e.bytes for e in expected)
    for real, plan in zip(recorded, expected, strict=True):
        extra = sum(real.held) - sum(plan.held)
        assert extra == 0 if plan.phase == "forward" else 0 <= extra <= largest, (real, plan)
        for band in ("parameters", "gradients"):
            assert real.held[BANDS.index(band)] == plan.held[BANDS.index(band)]


def work(rank: int, store: str, world: int, expected: list[list[Event]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for sharding, events in zip(SHARDINGS[world], expected, strict=True):
        tower, x = Tower(), torch.randn(ROWS, WIDTH)

        def run(tower: Any = tower, x: torch.Tensor = x) -> torch.Tensor:
            loss: torch.Tensor = tower(x).square().mean()
            return loss

        recorded = record_step(tower, run, sharding, mesh_of(sharding))
        if rank == 0:
            compare(recorded, events)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.parametrize("world", SHARDINGS)
def test_processes_do_what_was_planned(world: int, tmp_path: Path) -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    expected = [planned(sharding) for sharding in SHARDINGS[world]]
    mp.start_processes(work, (str(tmp_path / "store"), world, expected), world, start_method="forkserver")
