"""Softmax, LogSoftmax, and their variants fused with a bias and dropout as in ONNX Runtime Training."""
