"""`onnxruntime.training.api.checkpoint_state`."""

from onnxtrain.api import CheckpointState, Parameter, Parameters, Properties

__all__ = ["CheckpointState", "Parameter", "Parameters", "Properties"]
