"""`onnxruntime.training.ortmodule.graph_optimizers`: its optimizers are passes of onnxtrain."""
