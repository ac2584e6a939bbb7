"""Capture each call of a user's torch.autograd.Function as one PythonOp."""
