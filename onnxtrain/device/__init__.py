"""On-device training on stock onnxruntime: artifacts, checkpoints and the training API.

The modules that run on the device (training API, checkpoints) need onnxruntime and numpy, and never import torch.
"""
