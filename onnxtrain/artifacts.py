"""Generate the files to train a model on a device, and convert quantized models to trainable ones and back.

See docs/how-to/on-device-training.md.
"""

from onnxtrain.device.artifacts import LossType, OptimType, generate_artifacts
from onnxtrain.device.qat import FakeQuantized, fake_quantize, quantize_trained

__all__ = ["FakeQuantized", "LossType", "OptimType", "fake_quantize", "generate_artifacts", "quantize_trained"]
