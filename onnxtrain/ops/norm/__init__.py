"""Normalizations: layer and RMS norm, batch norm, group norm, weight norm, and ONNX's own norms."""
