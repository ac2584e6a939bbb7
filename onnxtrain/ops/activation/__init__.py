"""Activation functions. The gradient of each is a separate op, which runs as PyTorch's fused backward kernel.

    y = Gelu(x)        dx = GeluGrad(dy, x)

An ONNX attribute is a 32-bit float in a file and a Python float in memory. For float64 tensors only the op's body
matches PyTorch exactly, because it contains the attribute as a float64 constant.
"""
