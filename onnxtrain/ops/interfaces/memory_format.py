"""Which ops compute images in any memory format, for `plan/channels_last.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ops.interfaces import OpInterface


class Images(NamedTuple):
    """The inputs and outputs that hold images [n, c, h, w], all in the same memory format, whichever it is.

    Attributes:
        values: their names.
        prefers_channels_last: whether a node runs in channels_last memory format, in which it is faster, or contiguous;
            None for an op that runs in the memory format of its inputs.
    """

    values: frozenset[str]
    prefers_channels_last: Callable[[ir.Node], bool] | None = None


# The key in the metadata of a value: "channels_last" if it has this memory format in eager PyTorch.
EAGERS_FORMAT = "memory_format"

# Kernels of an op without an entry read inputs of any memory format and write contiguous outputs.
IMAGES = OpInterface[Images]("images", names=lambda images: images.values)
