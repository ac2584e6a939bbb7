"""`onnxruntime.training.ortmodule.torch_cpp_extensions`: onnxtrain has none."""
