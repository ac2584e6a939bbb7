"""The backend of torch.compile: `torch.compile(model, backend="onnxtrain", options={"rng": "torch"})`."""

from onnxtrain.frontend.dynamo import backend, captures, reports

__all__ = ["backend", "captures", "reports"]
