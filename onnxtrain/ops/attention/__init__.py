"""Attention: PyTorch's operator, attention written as matmuls and softmax, packed sequences, and ONNX's own ops."""
