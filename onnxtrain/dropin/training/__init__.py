"""`onnxruntime.training`, by onnxtrain.

Names are imported on first use: `onnxruntime.training.api` needs no torch.
"""

import importlib

from onnxruntime.capi._pybind_state import has_collective_ops

_HOME = {
    "ORTModule": "onnxtrain",
    "PropagateCastOpsStrategy": "onnxtrain.dropin.legacy",
    "TrainStepInfo": "onnxtrain.optim",
    "TrainingParameters": "onnxtrain.dropin.legacy",
    "is_ortmodule_available": "onnxtrain.dropin.legacy",
    "is_torch_interop_default_on": "onnxtrain.dropin.legacy",
    "is_triton_enabled": "onnxtrain.dropin.legacy",
    "set_seed": "onnxtrain.dropin.legacy",
}
_MODULES = ("amp", "api", "artifacts", "experimental", "onnxblock", "optim", "ortmodule", "torchdynamo", "utils")

__all__ = ["has_collective_ops"]
__all__ += list(_HOME)
__all__ += list(_MODULES)


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
