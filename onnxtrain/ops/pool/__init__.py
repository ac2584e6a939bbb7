"""Pooling over sliding windows and adaptive pooling; ONNX's own pools."""
