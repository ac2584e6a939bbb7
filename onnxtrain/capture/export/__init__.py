"""Run torch.export on a module: what is patched in PyTorch meanwhile, and what of its tracing is skipped."""
