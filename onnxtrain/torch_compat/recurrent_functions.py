"""The functions that recurrent modules and packed sequences call, which have no public names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal

_NAMES = ("_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu")

recurrent_functions: Mapping[str, Callable[..., Any]] = Internal[Mapping[str, Callable[..., Any]]](
    "recurrent_functions",
    lambda: {name: getattr(torch._VF, name) for name in _NAMES},
    why="packed sequences are traced as padded ones: these are what nn.utils.rnn and nn.LSTM call",
    fallback={},
    cost="modules with packed sequences run in PyTorch",
    check=lambda part: len(part) == len(_NAMES) and all(map(callable, part.values())),
).get()
