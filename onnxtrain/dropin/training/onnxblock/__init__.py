"""`onnxruntime.training.onnxblock`."""

from onnxtrain.onnxblock import (
    Block,
    ForwardBlock,
    TrainingBlock,
    base,
    blocks,
    custom_op_library,
    empty_base,
    load_checkpoint_to_model,
    loss,
    optim,
    save_checkpoint,
)

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
