"""`onnxruntime.training.ortmodule.experimental`."""
