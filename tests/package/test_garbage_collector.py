"""process_wide="pause_collector": no garbage collection while a module is captured, and as before afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.system.garbage_collector import collector_paused


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


class _Node:
    def __init__(self) -> None:
        self.itself = self


def _is_looked_at(node: _Node) -> bool:
    return any(each is node for each in gc.get_objects())


def test_it_is_enabled_again_and_finds_objects_created_meanwhile() -> None:
    gc.enable()
    with collector_paused(True):
        assert not gc.isenabled()
        with collector_paused(True):
            pass
        assert not gc.isenabled()
        seen = weakref.ref(_Node())
    assert gc.isenabled()
    gc.collect()
    assert seen() is None
    with pytest.raises(ZeroDivisionError), collector_paused(True):
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_one_that_is_off_stays_off() -> None:
    gc.disable()
    with collector_paused(True):
        pass
    assert not gc.isenabled()


def test_objects_that_a_program_froze_stay_frozen() -> None:
    gc.enable()
    node = _Node()
    assert _is_looked_at(node)
    gc.freeze()
    with collector_paused(True):
        pass
    # Its own object, not `gc.get_freeze_count`: other frozen ones may be freed meanwhile, by any thread.
    assert not _is_looked_at(node)


@pytest.mark.parametrize("process_wide", [(), ("pause_collector",)])
def test_it_rests_during_a_capture_where_it_is_asked_to(process_wide: tuple[str, ...]) -> None:
    gc.enable()
    was: list[bool] = []

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            was.append(gc.isenabled())
            return super().forward(x)

    ORTModule(Net(4, 4), process_wide=process_wide)(torch.randn(2, 4)).sum().backward()
    assert set(was) == {not process_wide}
    assert gc.isenabled()
