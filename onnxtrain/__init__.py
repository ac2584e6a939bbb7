"""onnxtrain trains PyTorch models as ONNX graphs: `model = onnxtrain.ORTModule(model)`.

Most public names are imported on first use, so that importing one part does not import all others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from onnxtrain import errors
from onnxtrain.errors import OnnxTrainError

if TYPE_CHECKING:
    from onnxtrain.execute.host_batch import to_device
    from onnxtrain.frontend.ort_module import ORTModule
    from onnxtrain.frontend.prepare import prepare, report_of, unprepare
    from onnxtrain.frontend.verification import verify
    from onnxtrain.options import FallbackPolicy, LogLevel, Options
    from onnxtrain.options.debug_options import DebugOptions

__version__ = "0.2.0"

__all__ = [
    "DebugOptions",
    "FallbackPolicy",
    "LogLevel",
    "ORTModule",
    "OnnxTrainError",
    "Options",
    "errors",
    "prepare",
    "report_of",
    "to_device",
    "unprepare",
    "verify",
]

_HOME = {
    "DebugOptions": "onnxtrain.options.debug_options",
    "FallbackPolicy": "onnxtrain.options",
    "LogLevel": "onnxtrain.options",
    "ORTModule": "onnxtrain.frontend.ort_module",
    "Options": "onnxtrain.options",
    "prepare": "onnxtrain.frontend.prepare",
    "report_of": "onnxtrain.frontend.prepare",
    "to_device": "onnxtrain.execute.host_batch",
    "unprepare": "onnxtrain.frontend.prepare",
    "verify": "onnxtrain.frontend.verification",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
