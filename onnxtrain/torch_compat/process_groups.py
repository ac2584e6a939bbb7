"""Access process groups whose collectives exchange nothing, so that one process can stand for any number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from onnxtrain.torch_compat.internal import Internal, missing

# Returns a store for the backend "fake", which importing its module registers.
fake_store = Internal[Callable[[], Any]](
    "fake_store",
    lambda: importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore,
    why="the backend that runs no collective is in PyTorch's test utilities",
    fallback=missing("fake_store"),
    cost="`onnxtrain plan-scale` does not run",
    check=callable,
)
