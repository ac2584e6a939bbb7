"""Capture PyTorch modules as graphs, and decide for each call whether a capture is valid."""
