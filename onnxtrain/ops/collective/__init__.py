"""Ops that communicate with the other processes of a group, over torch.distributed."""
