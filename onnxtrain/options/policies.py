"""The enums that options take, with the names and values of ONNX Runtime Training."""

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
    """How much is logged: everything from this level up."""

    VERBOSE = 0
    DEVINFO = 1
    INFO = 2
    WARNING = 3
    ERROR = 4
    FATAL = 5


class FallbackPolicy(IntFlag):
    """Which failures make a module run in plain PyTorch, with a warning, instead of raising."""

    FALLBACK_DISABLE = 1
    FALLBACK_FORCE_TORCH_FORWARD = 2
    FALLBACK_FORCE_TORCH_BACKWARD = 4
    FALLBACK_UNSUPPORTED_DEVICE = 8
    FALLBACK_UNSUPPORTED_DATA = 16
    FALLBACK_UNSUPPORTED_TORCH_MODEL = 32
    FALLBACK_UNSUPPORTED_ONNX_MODEL = 64
    FALLBACK_BAD_INITIALIZATION = 128

    def covers(self, error: BaseException) -> bool:
        """Whether the module runs in PyTorch after this error. FALLBACK_DISABLE wins over all other members."""
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
    """Which checks of a call ORTModule left out after the first one.

    onnxtrain leaves none out: whether a graph serves a call is recognised in microseconds.
    """

    SKIP_CHECK_DISABLED = 1
    SKIP_CHECK_DEVICE = 2
    SKIP_CHECK_BUILD_GRADIENT = 4
    SKIP_CHECK_EXECUTION_AGENT = 8


class MemoryOptLevel(IntEnum):
    """Who chooses what backward computes again."""

    USER_SPECIFIED = 0
    TRANSFORMER_LAYERWISE_RECOMPUTE = 1
    TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE = 2


@dataclass(frozen=True)
class SubgraphConfig:
    """What to do with the activations that one pattern of nodes computes: "BiasGelu+:1:-1".

    Attributes:
        pattern: the operators in order, each with "+" behind it.
        kind: 0: keep them, 1: compute them again, 2: also where something smaller is then kept in their place.
        count: the first so many; -1: all.
    """

    pattern: str
    kind: int
    count: int

    @classmethod
    def read(cls, text: str) -> SubgraphConfig:
        """Reads one such text; raises ValueError for all else."""
        found = re.fullmatch(r"((?:\w+\+)+):([012]):(-1|\d+)", text.strip())
        if found is None:
            raise ValueError(f"not a pattern with kind and count: {text!r}")
        return cls(found[1], int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.pattern}:{self.kind}:{self.count}"
