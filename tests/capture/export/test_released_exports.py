"""An export is garbage once its module is deleted: PyTorch would keep it until the next export."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule


def test_no_export_outlives_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[weakref.ref[torch.fx.Graph]] = []
    export = torch.export.export

    def recorded(*args: Any, **kwargs: Any) -> Any:
        program = export(*args, **kwargs)
        graphs.append(weakref.ref(program.graph))
        return program

    monkeypatch.setattr(torch.export, "export", recorded)
    model = ORTModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    model(torch.randn(2, 3)).sum().backward()
    del model
    gc.collect()
    assert [graph() for graph in graphs] == [None]
