"""The effects of options that no other test file covers."""

from __future__ import annotations

import pytest
import torch

from onnxtrain import ORTModule


@pytest.fixture
def cudnn_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permit to set flags of cuDNN, which PyTorch's test tools forbid once another test imports them."""
    its_globals = torch.backends.flags_frozen.__globals__  # torch.backends is a wrapper: its attributes are others
    monkeypatch.setitem(its_globals, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.usefixtures("cudnn_flags")
def test_an_exhaustive_search_is_cudnns_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def searches(**options: str) -> bool:
        torch.backends.cudnn.benchmark = False
        ORTModule(torch.nn.Linear(1, 1), **options)
        return torch.backends.cudnn.benchmark

    monkeypatch.delenv("ORTMODULE_CONV_ALGO_SEARCH", raising=False)
    assert not searches()
    assert searches(tuning="exhaustive")
    monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "EXHAUSTIVE")
    assert searches()
