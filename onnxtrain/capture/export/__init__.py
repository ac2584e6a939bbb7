"""Run torch.export on a module, with patches of PyTorch for the time of the trace and shortcuts that speed it up."""
