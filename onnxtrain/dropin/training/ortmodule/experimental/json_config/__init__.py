"""`onnxruntime.training.ortmodule.experimental.json_config`."""

from onnxtrain.dropin.legacy import load_from_json

__all__ = ["load_from_json"]
