"""Attention: PyTorch's operator, the form that models write out, packed sequences, and ONNX's own op."""
