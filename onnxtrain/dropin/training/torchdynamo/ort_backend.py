"""`onnxruntime.training.torchdynamo.ort_backend`."""

from onnxtrain.dropin.dynamo_backend import OrtBackend

__all__ = ["OrtBackend"]
