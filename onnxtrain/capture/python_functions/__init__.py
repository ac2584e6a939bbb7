"""Calls of a user's torch.autograd.Function: each becomes one PythonOp."""
