"""Every model of the zoo equals eager PyTorch, at all its sizes on one capture."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch

from tests.device_under_test import device
from tests.processor import has_narrow_convolutions, skip_without_narrow_lstms
from tests.zoo.checks import Comparison, compared, keeps_its_parameters, wrong
from tests.zoo.entry import ZooModel
from tests.zoo.models import ZOO

EVERYWHERE = ("mlp", "resnet", "lstm", "bert-classifier", "gpt2")
# `make test` trains each kind of layer in float32. What else is asked of models shows in a few.
LAYERS_OF_OTHERS = ("bert-masked-lm", "roberta", "distilbert", "mistral", "qwen2", "bart", "vit")
IN_FLOAT64 = ("mlp", "resnet", "lstm")
IN_EVAL_MODE = ("resnet", "bert-classifier", "lstm")
UNDER_AUTOCAST = ("mlp", "resnet", "bert-classifier")


def each_model(*, everywhere: bool = False, fast: Collection[str] | None = None) -> list[Any]:
    """The zoo: `everywhere` marks some models for all environments; if given, those that are not `fast` are slow."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        everywhere_marks = [pytest.mark.everywhere] if everywhere and name in EVERYWHERE else []
        return [*everywhere_marks, pytest.mark.slow] if fast is not None and name not in fast else everywhere_marks

    return [pytest.param(m, id=str(m), marks=marks(m.name)) for m in ZOO]


# Not AdamW: it divides a gradient by its own size, so that where the exact one is 0 (a key's bias before a softmax) or
# below rounding, chance decides the sign of a whole step, in eager too: for a GRU's embedding -2.5e-6 here, 3.8e-5 in
# eager, 1.3e-5 in float64, of 9e-3 at most.
MOMENTUM = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("entry", each_model(everywhere=True, fast={m.name for m in ZOO} - {*LAYERS_OF_OTHERS}))
def test_training_equals_eager(entry: ZooModel) -> None:
    check_training(entry, torch.float32)


@pytest.mark.parametrize("entry", each_model(everywhere=True, fast=IN_FLOAT64))
def test_training_in_float64_equals_eager(entry: ZooModel) -> None:
    check_training(entry, torch.float64)


def skip_batch_norms_of_cudnn(entry: ZooModel) -> None:
    if device().type == "cuda" and entry.name == "resnet":
        pytest.skip("on a GPU cuDNN computes eager's batch norms, with other rounding in the gradients of biases")


def check_training(entry: ZooModel, dtype: torch.dtype) -> None:
    skip_batch_norms_of_cudnn(entry)
    with compared(entry, dtype) as compare:
        for sizes in entry.sizes:
            # On a GPU kernels leave rounding in the gradients of a single token's scores, 0 in eager's math path.
            if device().type == "cpu" or sizes[1] != 1:
                compare.train(*sizes)
        compare.train_steps(MOMENTUM)


@pytest.mark.parametrize("entry", each_model(everywhere=True, fast=UNDER_AUTOCAST))
def test_training_under_autocast_equals_eager_under_autocast(entry: ZooModel) -> None:
    if entry.name == "lstm":
        skip_without_narrow_lstms()
    skip_batch_norms_of_cudnn(entry)
    with compared(entry, torch.float32, autocast=True) as compare:
        if entry.name == "resnet" and not has_narrow_convolutions():
            compare.train_narrow(*entry.sizes)
            return
        for sizes in entry.sizes:
            compare.train(*sizes)
        compare.train_steps(MOMENTUM)


@pytest.mark.parametrize("entry", each_model(fast={*IN_EVAL_MODE} - {"resnet"}))
def test_eval_equals_eager(entry: ZooModel) -> None:
    with compared(entry, torch.float32) as compare, torch.no_grad():
        compare.change(torch.nn.Module.eval)
        for sizes in entry.sizes:
            compare.forward(*sizes)


@pytest.mark.parametrize("entry", each_model(fast={*IN_EVAL_MODE} - {"bert-classifier"}))
def test_gradients_in_eval_mode_equal_eagers(entry: ZooModel) -> None:
    if device().type == "cuda" and entry.name in ("lstm", "gru"):
        pytest.skip("cuDNN has no gradient of recurrent layers in eval mode")
    with compared(entry, torch.float32) as compare:
        compare.change(torch.nn.Module.eval)
        compare.train(*entry.sizes[0])


# The checks themselves


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "resnet", "mlp"])
def test_the_checks_pass_for_eager_itself(name: str) -> None:
    entry = next(model for model in ZOO if model.name == name)
    compare = Comparison(entry, torch.float32, wrap=lambda module: module)
    compare.train(*entry.sizes[0])


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "resnet", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_the_checks_notice_a_gradient_that_is_wrong(name: str, dtype: torch.dtype) -> None:
    entry = next(model for model in ZOO if model.name == name)
    compare = Comparison(entry, dtype, wrap=wrong)
    with pytest.raises(AssertionError, match=r"gradient .*error"):
        compare.train(*entry.sizes[0])


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "resnet", "mlp"])
def test_the_checks_under_autocast_detect_errors_of_eight_bits(name: str) -> None:
    """A gradient that is 10 % off (T5's own in eager by up to 5 %); parameters that stay as they were."""
    entry = next(model for model in ZOO if model.name == name)
    Comparison(entry, torch.float32, wrap=lambda module: module, autocast=True).train_narrow(*entry.sizes)
    off = Comparison(entry, torch.float32, wrap=functools.partial(wrong, factor=1.1), autocast=True)
    with pytest.raises(AssertionError, match=r"gradient .*error"):
        off.train_narrow(*entry.sizes)
    stale = Comparison(entry, torch.float32, wrap=keeps_its_parameters, autocast=True)
    with pytest.raises(AssertionError, match="error"):
        stale.train_narrow(*entry.sizes)
