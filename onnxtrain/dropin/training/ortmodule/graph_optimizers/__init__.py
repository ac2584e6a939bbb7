"""`onnxruntime.training.ortmodule.graph_optimizers`: those that came with it are passes of onnxtrain."""
