"""Python side effects of forward: a graph would not repeat them, so a module that has any is not captured.

A changed attribute (`self.calls += 1`) is noticed by comparing the modules' attributes before and after the capture,
and undone, because the capture ran forward once more than the user did.
"""

from __future__ import annotations

from typing import Any

import torch

from onnxtrain.capture.key import ModuleState
from onnxtrain.errors import CaptureError


class SideEffects:
    """Watches a module while it is captured."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._before = ModuleState.take(module, [])
        self._attributes = [(m, dict(m.__dict__), _copies(m.__dict__)) for m in module.modules()]

    def check(self) -> None:
        """Raises CaptureError where forward changed the module's attributes."""
        changed = self._before.difference(self._module)
        if changed:
            raise CaptureError(
                f"forward changes the module's Python state, which a graph would not repeat: {changed}",
                where=type(self._module).__name__,
                todo="keep what changes in a registered buffer, and change it in place",
            )

    def undo(self) -> None:
        """Puts back all attributes."""
        for module, attributes, copies in self._attributes:
            if module.__dict__.keys() != attributes.keys() or any(
                module.__dict__[k] is not v for k, v in attributes.items()
            ):
                module.__dict__.clear()
                module.__dict__.update(attributes)
            for holder, content in copies:
                if holder != content:
                    holder.clear()
                    holder.extend(content) if isinstance(holder, list) else holder.update(content)


def _copies(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Plain containers among the attributes with copies of what they hold."""
    own = ("_parameters", "_buffers", "_modules")
    found = [(v, v.copy()) for k, v in attributes.items() if type(v) in (list, dict, set) and k not in own]
    return [(v, c) for v, c in found if _comparable(v)]


def _comparable(holder: Any) -> bool:
    """Whether == on the container is a plain bool: tensors inside would make it a tensor."""
    items = holder.values() if isinstance(holder, dict) else holder
    return not any(isinstance(item, torch.Tensor) for item in items)
