"""Every pass can be disabled: the models of the zoo train as in eager PyTorch without it too (with it: test_zoo.py)."""

from __future__ import annotations

import functools

import pytest
import torch

from onnxtrain import ORTModule
from onnxtrain.errors import OptionError
from onnxtrain.passes import FORMER_NAMES, FORWARD, JOINT
from tests.zoo.checks import Comparison
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

PASSES = tuple(dict.fromkeys(run.__name__ for run in (*FORWARD, *JOINT)))
MODELS = [entry for entry in ZOO if entry.falls_back is None]


@functools.cache
def passes_that_change(name: str) -> frozenset[str]:
    """The passes that change the graph of a model."""
    entry = next(e for e in MODELS if e.name == name)
    model = ORTModule(entry.build(torch.float32), rng="torch")
    call = entry.arguments(*entry.sizes[0])
    entry.loss(model(*call.args, **call.kwargs)).backward()
    return frozenset(text.partition(":")[0] for stage in model.report().stages for text in stage.applied)


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_training_without_a_pass_equals_eager(entry: ZooModel, name: str) -> None:
    if name not in passes_that_change(entry.name):
        pytest.skip(f"{name} changes nothing in it")

    def without(module: torch.nn.Module) -> torch.nn.Module:
        return ORTModule(module, rng="torch", disabled_passes=(name,))

    compare = Comparison(entry, torch.float32, wrap=without)
    for sizes in entry.sizes:
        compare.train(*sizes)
    stages = compare.got.run.report().stages
    assert not any(text.startswith(f"{name}:") for stage in stages for text in stage.applied)


@pytest.mark.slow
@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_training_without_any_pass_equals_eager(entry: ZooModel) -> None:
    def without(module: torch.nn.Module) -> torch.nn.Module:
        return ORTModule(module, rng="torch", disabled_passes=PASSES, skip_padding="never")

    Comparison(entry, torch.float32, wrap=without).train(*entry.sizes[0])


@pytest.mark.slow
@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_training_packed_equals_eager(entry: ZooModel) -> None:
    """Batches of any size and density run without padding tokens wherever packing is possible."""

    def packed(module: torch.nn.Module) -> torch.nn.Module:
        return ORTModule(module, rng="torch", skip_padding="always")

    compare = Comparison(entry, torch.float32, wrap=packed)
    for sizes in entry.sizes:
        compare.train(*sizes)


def test_an_unknown_disabled_pass_is_an_error() -> None:
    with pytest.raises(OptionError, match=r"expected: .*eliminate_common_subexpressions.*\n.*got: +fuse_everything"):
        ORTModule(torch.nn.Linear(1, 1), disabled_passes="fuse_everything")(torch.ones(1, 1))


def test_a_disabled_pass_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXTRAIN_DISABLED_PASSES", "eliminate_common_subexpressions,eliminate_dead_code")
    model = ORTModule(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1)).backward()
    ran = {done.name for stage in model.report().stages for done in stage.passes}
    assert "fold_constants" in ran
    assert not {"eliminate_common_subexpressions", "eliminate_dead_code"} & ran


def test_a_former_pass_name_is_accepted_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    model = ORTModule(torch.nn.Linear(1, 1), disabled_passes="dedupe")
    model(torch.ones(1, 1)).backward()
    ran = {done.name for stage in model.report().stages for done in stage.passes}
    assert "eliminate_common_subexpressions" not in ran
    assert "'dedupe' is now named 'eliminate_common_subexpressions'" in caplog.text


def test_former_pass_names_lead_to_passes() -> None:
    assert set(FORMER_NAMES.values()) <= set(PASSES)
    assert not set(FORMER_NAMES) & set(PASSES)
