"""`onnxruntime.training.torchdynamo.register_backend`."""

from onnxtrain.dropin.dynamo_backend import DEFAULT_BACKEND, make_aot_ort

aot_ort = dynamic_aot_ort = ort = DEFAULT_BACKEND

__all__ = ["DEFAULT_BACKEND", "aot_ort", "dynamic_aot_ort", "make_aot_ort", "ort"]
