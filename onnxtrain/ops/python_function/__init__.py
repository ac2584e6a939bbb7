"""The user's `torch.autograd.Function` as a node of the graph."""
