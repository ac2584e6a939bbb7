"""Custom training graphs built from blocks: the successor of onnxruntime.training.onnxblock.

See docs/how-to/on-device-training.md.
"""

from onnxtrain.device.block import Block, ForwardBlock, base, custom_op_library, empty_base
from onnxtrain.device.block_checkpoint import load_checkpoint_to_model, save_checkpoint
from onnxtrain.device.training_block import TrainingBlock
from onnxtrain.onnxblock import blocks, loss, optim

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
