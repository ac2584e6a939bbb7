"""The key: the state of PyTorch, of the module and of its surroundings, which decides the capture for a call."""
