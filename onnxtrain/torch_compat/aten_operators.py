"""Access ATen operators without a public name that occur in exported graphs."""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.torch_compat.internal import required


class _AbsentPacket:
    """The fallback for an operator that this PyTorch lacks: each overload is an object that no node calls."""

    def __getattr__(self, overload: str) -> object:
        return object()


def _packet(name: str) -> Any:
    why = "torch.export traces calls of it"
    return required(
        f"aten::{name}",
        lambda: getattr(torch.ops.aten, name),
        why,
        check=lambda part: "default" in part.overloads(),
        fallback=_AbsentPacket(),
    )


CONJ = _packet("_conj")
LOG_SOFTMAX = _packet("_log_softmax")
NATIVE_BATCH_NORM = _packet("_native_batch_norm_legit")
NATIVE_BATCH_NORM_FUNCTIONAL = _packet("_native_batch_norm_legit_functional")
NATIVE_BATCH_NORM_NO_TRAINING = _packet("_native_batch_norm_legit_no_training")
TO_COPY = _packet("_to_copy")
UNSAFE_VIEW = _packet("_unsafe_view")
