"""Recurrent layers: PyTorch's (`layer`, captured in `capture`) and ONNX's own with what training keeps (`standard`).

All share the facts of `cells`, the kernels of `steps` and the standard ops of `unrolled`.
"""
