"""The state of PyTorch, of the module and of what forward reads outside it: it decides which capture serves a call."""
