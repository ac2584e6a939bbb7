"""The option capture_seconds: a capture that takes too long is given up, and the module runs in PyTorch."""

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import SlowCaptureError
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches
from tests.thinned import slow_but_every


class Unrolled(nn.Module):
    """A loop of many steps, which a graph has to repeat."""

    def __init__(self, steps: int = 400) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.steps):
            x = torch.tanh(self.inner(x))
        return x


def test_a_capture_that_takes_too_long_is_given_up() -> None:
    eager = Unrolled()
    ours = ORTModule(copy.deepcopy(eager), capture_seconds=0.2)
    x = torch.randn(3, 8)
    start = time.thread_time()
    with pytest.warns(UserWarning, match="Unrolled runs in PyTorch, not as an ONNX graph") as caught:
        assert_matches(ours(x), eager, x)
    assert time.thread_time() - start < 5.0, "far more than the limit"
    (warning,) = [str(w.message) for w in caught if "capture_seconds" in str(w.message)]
    assert "at most 0.2 s of processor time (the option capture_seconds)" in warning
    assert "got:      tracing forward 0." in warning
    assert "test_capture_seconds.py" in warning
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(ours(x), eager, x)  # and is not tried again
    assert engine_of(ours).captures == 0


def test_the_error_is_raised_if_the_policy_forbids_a_fallback() -> None:
    ours = ORTModule(Unrolled(), capture_seconds=0.2, fallback_policy="FALLBACK_DISABLE")
    with pytest.raises(SlowCaptureError, match="capturing and compiling Unrolled took too long"):
        ours(torch.randn(3, 8))


class CatchesEverything(Unrolled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except Exception:  # noqa: BLE001  # as in models that have another way
            return x


def test_forward_cannot_catch_the_error() -> None:
    eager = CatchesEverything()
    ours = ORTModule(copy.deepcopy(eager), capture_seconds=0.2)
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="took too long"):
        assert_matches(ours(x), eager, x)


STAGES = ("onnxtrain.compile.plan_memory", "onnxtrain.capture.capture.compile_guards")


@pytest.mark.parametrize("slow", slow_but_every(2, STAGES))
def test_any_stage_can_exceed_the_limit(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = slow.rsplit(".", 1)
    module = __import__(path, fromlist=[name])
    original: Callable[..., Any] = getattr(module, name)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        end = time.thread_time() + 3.0
        while time.thread_time() < end:
            pass
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, slowly)
    eager = Unrolled(steps=1)
    ours = ORTModule(copy.deepcopy(eager), capture_seconds=2.5)
    x = torch.randn(3, 8)
    with pytest.warns(UserWarning, match="took too long") as caught:
        assert_matches(ours(x), eager, x)
    part = "planning and lowering" if "plan" in slow else "guards"
    assert any(f"got:      {part} 3." in str(w.message) for w in caught)
