"""How ops with effects may run again in backward, for `plan/recompute.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import onnx_ir as ir

from onnxtrain.ops.interfaces import OpInterface


class Replay(NamedTuple):
    """How backward repeats a random op with the same random values.

    Attributes:
        reads: the names of the outputs that are kept for it: the sampled values.
        build: (op, node, *these outputs) -> the first output, bit for bit, computed from them and the node's inputs.
    """

    reads: tuple[str, ...]
    build: Callable[..., ir.Value]


# Outputs of a random op without an entry must be kept.
REPLAYS = OpInterface[Replay]("replay", names=lambda replay: replay.reads)
# From the node, whether running it again gives the same outputs and does nothing else, although the op has effects.
REPEATABLE = OpInterface[Callable[[ir.Node], bool]]("repetition")
# Outputs that are Python objects in a running program, not tensors.
OBJECT_OUTPUTS = OpInterface[frozenset[str]]("Python objects", names=lambda outputs: outputs)
