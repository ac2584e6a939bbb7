"""`onnxruntime.training.api`."""

from onnxtrain.api import CheckpointState, LinearLRScheduler, Module, Optimizer, Parameter, Parameters, Properties

__all__ = ["CheckpointState", "LinearLRScheduler", "Module", "Optimizer", "Parameter", "Parameters", "Properties"]
