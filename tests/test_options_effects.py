"""What options do that have no other place for a test."""

import pytest
import torch

from onnxtrain import ORTModule


@pytest.mark.parametrize("by_variable", [True, False])
def test_an_exhaustive_search_is_cudnns_benchmark(by_variable, monkeypatch):
    # PyTorch's own test tools, which other tests import, forbid to set it.
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.delenv("ORTMODULE_CONV_ALGO_SEARCH", raising=False)
    ORTModule(torch.nn.Linear(1, 1))
    assert not torch.backends.cudnn.benchmark
    if by_variable:
        monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "EXHAUSTIVE")
        ORTModule(torch.nn.Linear(1, 1))
    else:
        ORTModule(torch.nn.Linear(1, 1), conv_algo_search="EXHAUSTIVE")
    assert torch.backends.cudnn.benchmark
