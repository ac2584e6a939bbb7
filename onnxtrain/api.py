"""Train the artifacts of `onnxtrain.artifacts` on a stock onnxruntime, with the interface of onnxruntime.training.api.

Requires onnxruntime and numpy, and does not import torch.
"""

from onnxtrain.device.checkpoint_state import CheckpointState, Parameter, Parameters, Properties
from onnxtrain.device.training import LinearLRScheduler, Module, Optimizer

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "Parameters", "Properties"]
