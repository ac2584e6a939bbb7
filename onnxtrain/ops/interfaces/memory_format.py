"""Which ops compute images in any memory format, for `plan/channels_last.py`."""

from __future__ import annotations

from typing import NamedTuple

from onnxtrain.ops.interfaces import OpInterface


class Images(NamedTuple):
    """The inputs and outputs that hold images [n, c, h, w], all in the same memory format, whichever it is.

    Attributes:
        values: their names.
        prefers_channels_last: whether the op runs faster in channels_last memory format.
    """

    values: frozenset[str]
    prefers_channels_last: bool = False


# Kernels of an op without an entry read inputs of any memory format and write contiguous outputs.
IMAGES = OpInterface[Images]("images", names=lambda images: images.values)
