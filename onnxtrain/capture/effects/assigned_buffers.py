"""Turn assignments to buffers into in-place writes.

    self.seen = self.seen + x.sum(0)    as    self.seen.copy_(self.seen + x.sum(0))

torch.export does this for buffers of the module itself, and loses assignments to buffers of its submodules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from onnxtrain.errors import ChangedParameterError
from onnxtrain.torch_compat.tensors import storage_id


class _Assigned(NamedTuple):
    """`holder[name]` was `before`."""

    holder: dict[str, torch.Tensor | None]
    name: str
    path: str
    before: torch.Tensor | None
    after: torch.Tensor | None


class AssignedBuffers:
    """The registered buffers of a module and its submodules before forward, to find which it assigns.

    Create it inside the export, which replaces all buffers itself, and before forward runs.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._before = [(path, inner, dict(inner._buffers)) for path, inner in module.named_modules()]

    def write(self, results: Iterable[object]) -> None:
        """Copy each assigned tensor into the buffer that it replaced, and put that back.

        Args:
            results: what forward returns.

        Raises:
            ChangedParameterError: forward adds or removes a buffer, changes its shape, dtype or requires_grad, or
                returns an assigned tensor: in eager PyTorch the caller's writes to the result change the buffer.
        """
        assignments = [
            _Assigned(module._buffers, name, f"{path}.{name}" if path else name, before.get(name), after)
            for path, module, before in self._before
            for name, after in {**dict.fromkeys(before), **module._buffers}.items()
            if after is not before.get(name)
        ]
        returned = {storage_id(result) for result in results if isinstance(result, torch.Tensor)}
        for assigned in assignments:
            _check(assigned)
            if assigned.after is not None and storage_id(assigned.after) in returned:
                raise ChangedParameterError(
                    "forward assigns a tensor to a buffer and returns it: the result and the buffer share memory",
                    where=assigned.path,
                    todo="the module runs in PyTorch; return a clone of the buffer",
                )
        values = [a.after.clone() for a in assignments if a.after is not None]  # forward may swap two buffers
        for assigned, value in zip(assignments, values, strict=True):
            assert assigned.before is not None
            assigned.before.copy_(value)
            assigned.holder[assigned.name] = assigned.before


def _check(assigned: _Assigned) -> None:
    kinds = [_kind(value) for value in (assigned.before, assigned.after)]
    if kinds[0] != kinds[1] or assigned.after is None or assigned.after.requires_grad:
        raise ChangedParameterError(
            "forward assigns to a buffer what its memory cannot hold",
            where=assigned.path,
            expected=kinds[0],
            got=kinds[1] + (" with a gradient" if assigned.after is not None and assigned.after.requires_grad else ""),
            todo="the module runs in PyTorch; keep the buffer's shape and type, and detach what is assigned",
        )


def _kind(value: torch.Tensor | None) -> str:
    """Dtype, shape and device. A symbolic dimension never equals one of the buffer, which are fixed."""
    return "none" if value is None else f"{value.dtype}{list(value.shape)} on {value.device}"
