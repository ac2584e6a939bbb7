"""`onnxruntime.training.ort_triton`: registration of Triton kernels, which onnxtrain does not support."""

from onnxtrain.dropin.legacy import register_triton_kernel

__all__ = ["register_triton_kernel"]
