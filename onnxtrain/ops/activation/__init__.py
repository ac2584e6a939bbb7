"""Activation functions. Each has its gradient as an op of its own, which is PyTorch's fused backward kernel.

    y = Gelu(x)        dx = GeluGrad(dy, x)

An ONNX attribute is a 32-bit float in a file and a Python float in memory. In float64 only a body, which writes the
number as a float64 constant, says exactly what PyTorch computes.
"""
