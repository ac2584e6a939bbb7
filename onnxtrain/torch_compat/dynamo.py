"""Configure torch.compile's tracer: functions that it must not trace, and errors after which it runs plain Python."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch

from onnxtrain.torch_compat.internal import Internal, can_be_entered

_F = TypeVar("_F", bound=Callable[..., Any])


def _find_skip() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    frames = importlib.import_module("torch._C._dynamo.eval_frame")
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)

    def skip(function: Callable[..., Any]) -> Callable[..., Any]:
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        frames.set_code_exec_strategy(function.__code__, strategy)
        return function

    return skip


_skip_frames = Internal[Callable[[Callable[..., Any]], Callable[..., Any]]](
    "skip_frames",
    _find_skip,
    why="torch.compiler.disable does the same, but imports all of dynamo (0.9 s)",
    fallback=torch.compiler.disable,
    cost="importing onnxtrain takes a second longer",
    check=callable,
)


def untraced(function: _F) -> _F:
    """Decorate a function that torch.compile must not trace, including its callees: the module is already a graph."""
    return cast(_F, _skip_frames.get()(function))


def _patch_of_suppressed_errors() -> AbstractContextManager[Any]:
    return torch._dynamo.config.patch(suppress_errors=True)


SUPPRESSED_ERRORS = Internal[Callable[[], AbstractContextManager[Any]]](
    "suppressed_errors",
    lambda: _patch_of_suppressed_errors,
    why="code that torch.compile cannot trace runs in Python; the option is documented, in a private module",
    fallback=nullcontext,
    cost="a part of a module that torch.compile cannot trace raises its error",
    check=lambda part: bool(torch._dynamo.config.suppress_errors) in (True, False),
)


def _find_numpy_samples() -> Callable[[], AbstractContextManager[Any]]:
    config = importlib.import_module("torch._dynamo.config")
    assert hasattr(config, "use_numpy_random_stream")
    return lambda: config.patch("use_numpy_random_stream", True)


NUMPY_SAMPLES = Internal[Callable[[], AbstractContextManager[Any]]](
    "numpy_samples",
    _find_numpy_samples,
    why="torch.compile replaces functions of numpy.random by its own, which sample from PyTorch's generator",
    fallback=nullcontext,
    cost="in a module with graph breaks, numpy.random samples other numbers than in eager",
    check=can_be_entered,
)
