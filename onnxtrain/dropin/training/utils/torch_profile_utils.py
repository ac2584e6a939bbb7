"""`onnxruntime.training.utils.torch_profile_utils`."""

from onnxtrain.observe.memory import log_memory_usage
from onnxtrain.observe.nvtx import nvtx_function_decorator, torch_nvtx_range_pop, torch_nvtx_range_push

__all__ = ["log_memory_usage", "nvtx_function_decorator", "torch_nvtx_range_pop", "torch_nvtx_range_push"]
