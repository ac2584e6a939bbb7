"""Connect the parameters and buffers in a trace with those of the module."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from onnxtrain.capture.blocks.parameter_table import registered
from onnxtrain.capture.guards.traced_graph import PLAIN, Buffer, TracedState, traced_nodes


class ModuleTensors:
    """The parameters and buffers of a module that is not traced yet."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._values = {path: tensor for path, _, _, tensor in self._registered()}

    def traced(self) -> list[TracedState]:
        """Return those that the running trace contains. Forward must not have changed them."""
        found = list(self._registered())
        nodes = traced_nodes([tensor for _, _, _, tensor in found])
        return [
            TracedState(node, self._values[path], Buffer(owner, path.rpartition(".")[2], path) if is_buffer else None)
            for node, (path, owner, is_buffer, _) in zip(nodes, found, strict=True)
            if node is not None and path in self._values and type(self._values[path]) in PLAIN
        ]

    def _registered(self) -> Iterator[tuple[str, torch.nn.Module, bool, torch.Tensor]]:
        for prefix, owner in self._root.named_modules():
            for table in ("_parameters", "_buffers"):
                for name, tensor in registered(owner, table).items():
                    if tensor is not None:
                        yield f"{prefix}.{name}" if prefix else name, owner, table == "_buffers", tensor
