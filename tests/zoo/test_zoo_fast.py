"""With the default rng="fast" and its compiled kernels models equal eager PyTorch too, where nothing is dropped."""

from __future__ import annotations

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.ops.attention import compiled_kernels
from onnxtrain.ops.random import keyed_bits
from tests.zoo.checks import Comparison, compare_named
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

OFTEN = {"gpt2"}  # the others under --slow
MODELS = [
    pytest.param(entry, id=str(entry), marks=[] if entry.name in OFTEN else [pytest.mark.slow])
    for entry in ZOO
    if entry.falls_back is None
]


def fast(module: torch.nn.Module) -> torch.nn.Module:
    for library in (compiled_kernels.LIBRARIES[torch.float32], keyed_bits.LIBRARY):
        library.wait()
    return ORTModule(module, rng="fast")


@pytest.mark.parametrize("entry", MODELS)
def test_gradients_equal_eagers(entry: ZooModel) -> None:
    compare = Comparison(entry, torch.float32, wrap=fast)
    compare.change(torch.nn.Module.eval)
    for sizes in entry.sizes:
        compare.train(*sizes)


@pytest.mark.parametrize("name", sorted(OFTEN))
def test_compiled_kernels_train_as_operators_do(name: str) -> None:
    """With dropout on: both sample the same masks, so that all gradients are the same."""
    entry = next(e for e in ZOO if e.name == name)
    grads = []
    for native in (False, True):
        module = fast_or_operators(entry.build(torch.float64), native).train()
        call = entry.arguments(*entry.sizes[0]).to(torch.float64)
        torch.manual_seed(5)
        loss = entry.loss(module(*call.args, **call.kwargs))
        loss.backward()
        grads.append({n: p.grad for n, p in module.named_parameters()} | {"loss": loss.detach()})
        assert ("compiled" in engine_of(module).newest().unit.forward.source) == native
    operators, kernels = grads
    compare_named(name, kernels, operators, operators)


def fast_or_operators(module: torch.nn.Module, native: bool) -> torch.nn.Module:
    return fast(module) if native else ORTModule(module, rng="fast", kernels="pytorch")
