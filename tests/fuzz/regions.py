"""Fused regions without a compiler: each runs its own nodes, to test how regions are built and called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from onnxtrain.execute.regions import program as fused
from onnxtrain.execute.regions.request import Request
from tests.execute.region_cases import fused_programs, nodes_as_kernel, wait_for


@contextmanager
def made_up_compiler() -> Iterator[Callable[[], None]]:
    """Fuse all regions of any size after one call; yield a function that waits until they are ready."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        programs = fused_programs(patch)
        patch.setattr(fused, "_CALLS", 1)
        patch.setattr(fused, "build", partial(_written, Path(folder)))
        patch.setattr(fused, "load", nodes_as_kernel)
        yield lambda: wait_for(programs)


def _written(folder: Path, requests: Sequence[Request], _dump: Path | None) -> Iterator[tuple[Request, Path]]:
    for number, request in enumerate(requests):
        request_folder = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=folder))
        request.write(request_folder)
        yield request, request_folder
