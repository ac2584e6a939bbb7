"""`onnxruntime.training.torchdynamo`."""
