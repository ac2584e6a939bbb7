"""Buffers that forward assigns, instead of writing to them.

    self.seen = self.seen + x.sum(0)    as    self.seen.copy_(self.seen + x.sum(0))

torch.export does so for buffers of the module that it is given, and forgets what becomes of those of modules inside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from onnxtrain.errors import ChangedParameterError


class _Assigned(NamedTuple):
    """`holder[name]` was `before`."""

    holder: dict[str, torch.Tensor | None]
    name: str
    path: str
    before: torch.Tensor | None
    after: torch.Tensor | None


class AssignedBuffers:
    """What forward assigns to the registered buffers of a module and of those inside it.

    It is made before forward runs, inside the export, which exchanges all of them itself.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._before = [(path, inner, dict(inner._buffers)) for path, inner in module.named_modules()]

    def write(self) -> None:
        """Writes what was assigned to the tensors that were there.

        Raises:
            ChangedParameterError: a buffer came, went, or would have another shape, type or gradient.
        """
        found = [
            _Assigned(module._buffers, name, f"{path}.{name}" if path else name, before.get(name), after)
            for path, module, before in self._before
            for name, after in {**dict.fromkeys(before), **module._buffers}.items()
            if after is not before.get(name)
        ]
        for each in found:
            _check(each)
        values = [each.after.clone() for each in found if each.after is not None]  # two buffers may change places
        for each, value in zip(found, values, strict=True):
            assert each.before is not None
            each.before.copy_(value)
            each.holder[each.name] = each.before


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
    """Type, sizes and device; a size that is open is no number, and so never the buffer's own."""
    return "none" if value is None else f"{value.dtype}{list(value.shape)} on {value.device}"
