"""Enums of options, with the names and values of ONNX Runtime Training."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from onnxtrain.errors import (
    ORTModuleDeviceException,
    ORTModuleFallbackException,
    ORTModuleInitException,
    ORTModuleIOError,
    ORTModuleONNXModelException,
    ORTModuleTorchModelException,
)


class LogLevel(IntEnum):
    """The lowest level that is logged."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


class FallbackPolicy(IntFlag):
    """The failures after which a module falls back to eager PyTorch, with a warning, instead of raising."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def covers(self, error: BaseException) -> bool:
        """Return whether the module falls back after this error. FALLBACK_DISABLE overrides all other members."""
        if FallbackPolicy.FALLBACK_DISABLE in self:
            return False
        return any(isinstance(error, _FALLS_BACK_AFTER[policy]) for policy in self)


_FALLS_BACK_AFTER: dict[FallbackPolicy, tuple[type[ORTModuleFallbackException], ...]] = {
    FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD: (ORTModuleFallbackException,),
    FallbackPolicy.FALLBACK_FORCE_TORCH_BACKWARD: (ORTModuleFallbackException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE: (ORTModuleDeviceException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_DATA: (ORTModuleIOError,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_TORCH_MODEL: (ORTModuleTorchModelException,),
    FallbackPolicy.FALLBACK_UNSUPPORTED_ONNX_MODEL: (ORTModuleONNXModelException,),
    FallbackPolicy.FALLBACK_BAD_INITIALIZATION: (ORTModuleInitException, ORTModuleTorchModelException),
}


class SkipCheck(IntFlag):
    """The checks that ORTModule could skip after the first call.

    onnxtrain never skips them: checking whether a graph fits a call takes microseconds.
    """

    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8


class MemoryOptLevel(IntEnum):
    """The way to choose the activations that backward recomputes."""

    USER_SPECIFIED = 0
    TRANSFORMER_LAYERWISE_RECOMPUTE = 1
    TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE = 2


@dataclass(frozen=True)
class SubgraphConfig:
    """Whether to recompute the activations that one pattern of nodes computes: "BiasGelu+:1:-1".

    Attributes:
        pattern: the operators in order, each followed by "+".
        kind: 0: keep, 1: recompute, 2: recompute even if a smaller tensor must be kept for it.
        count: applies to the first `count` occurrences; -1: to all.
    """

    pattern: str
    kind: int
    count: int

    @classmethod
    def read(cls, text: str) -> SubgraphConfig:
        """Parse the text form; raises ValueError if it is malformed."""
        match = re.fullmatch(r"((?:\w+\+)+):([012]):(-1|\d+)", text.strip())
        if match is None:
            raise ValueError(f"expected pattern:kind:count such as BiasGelu+:1:-1, got {text!r}")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.pattern}:{self.kind}:{self.count}"
