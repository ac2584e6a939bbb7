"""Fake quantization, and matmuls with frozen 4-bit weights."""
