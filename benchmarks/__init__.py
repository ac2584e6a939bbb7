"""Measures onnxtrain against eager PyTorch and torch.compile; `make bench` runs it. Timings are never asserted."""
