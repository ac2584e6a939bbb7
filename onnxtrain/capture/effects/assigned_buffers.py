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


class _Assignment(NamedTuple):
    """An assignment that replaced `before` by `after` in `buffers[name]`; `path` is the name from the whole module."""

    buffers: dict[str, torch.Tensor | None]
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
        """Copy each assigned tensor into the buffer that it replaced, and restore the buffer.

        Args:
            results: what forward returns.

        Raises:
            ChangedParameterError: forward adds or removes a buffer, changes its shape, dtype or requires_grad, or
                returns an assigned tensor: in eager PyTorch the caller's writes to the result change the buffer.
        """
        assignments = [
            _Assignment(module._buffers, name, f"{path}.{name}" if path else name, before.get(name), after)
            for path, module, before in self._before
            for name, after in {**dict.fromkeys(before), **module._buffers}.items()
            if after is not before.get(name)
        ]
        returned = {storage_id(result) for result in results if isinstance(result, torch.Tensor)}
        for assignment in assignments:
            _check(assignment)
            if assignment.after is not None and storage_id(assignment.after) in returned:
                raise ChangedParameterError(
                    "forward assigns a tensor to a buffer and returns it: the result and the buffer share memory",
                    where=assignment.path,
                    todo="the module runs in PyTorch; return a clone of the buffer",
                )
        values = [a.after.clone() for a in assignments if a.after is not None]  # forward may swap two buffers
        for assignment, value in zip(assignments, values, strict=True):
            assert assignment.before is not None
            assignment.before.copy_(value)
            assignment.buffers[assignment.name] = assignment.before


def _check(assignment: _Assignment) -> None:
    after = assignment.after
    expected, got = _describe(assignment.before), _describe(after)
    if expected != got or after is None or after.requires_grad:
        raise ChangedParameterError(
            "forward replaces a buffer by a tensor of another shape, dtype or device, or by one with a gradient",
            where=assignment.path,
            expected=expected,
            got=got + (" with a gradient" if after is not None and after.requires_grad else ""),
            todo="the module runs in PyTorch; keep the buffer's shape and dtype, and detach the assigned tensor",
        )


def _describe(value: torch.Tensor | None) -> str:
    """Return dtype, shape and device. A symbolic dimension never equals a dimension of the buffer, which are static."""
    return "None" if value is None else f"{value.dtype}{list(value.shape)} on {value.device}"
