"""What trains a model on a device: `generate_artifacts`. See docs/on-device-training.md."""

from onnxtrain.device.artifacts import LossType, OptimType, generate_artifacts

__all__ = ["LossType", "OptimType", "generate_artifacts"]
