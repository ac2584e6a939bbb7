"""Convert a functional exported program to ONNX."""
