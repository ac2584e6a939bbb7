"""`onnxruntime.training.ort_triton`: kernels that onnxruntime called by name, of which there are none here."""

from onnxtrain.dropin.legacy import register_triton_kernel

__all__ = ["register_triton_kernel"]
