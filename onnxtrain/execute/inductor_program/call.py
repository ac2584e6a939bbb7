"""A call of a program's artifact."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from onnxtrain.execute.inductor_program.request import Layout
from onnxtrain.execute.inductor_program.split import Split
from onnxtrain.execute.inductor_program.stored import StoredProgram
from onnxtrain.execute.program import Results, Run
from onnxtrain.execute.regions.request import MIN_DYNAMIC_SIZE
from onnxtrain.native.build import BuildError
from onnxtrain.system.cache_folder import scratch_folder
from onnxtrain.torch_compat import program_compiler

_MAX_SIZES = 1024  # sets of sizes whose strides are remembered
_load_lock = threading.Lock()  # PyTorch changes settings of the process while it loads an artifact
Artifact = Callable[[list[Any]], Sequence[torch.Tensor]]


def load(path: Path) -> tuple[Artifact, StoredProgram]:
    """Load what `child.compile_program` wrote.

    Raises:
        BuildError: this PyTorch cannot load it.
    """
    try:
        stored = StoredProgram.read(path)
        with _load_lock, scratch_folder(path) as scratch:
            file = scratch / "artifact.bin"
            file.write_bytes(stored.artifact)
            return program_compiler.load(file), stored
    except Exception as error:  # whatever PyTorch raises
        raise BuildError(f"loading the program ended with an error: {type(error).__name__}: {error}") from error


class ArtifactCall:
    """Run a program by its artifact, for the sizes and strides that the artifact supports."""

    def __init__(self, split: Split, layout: Layout, artifact: Artifact, stored: StoredProgram, views: Run) -> None:
        """Combine the two parts of a split.

        Args:
            split: the parts.
            layout: the sizes and strides of the arguments.
            artifact: computes the first part.
            stored: what belongs to it.
            views: runs the second part.
        """
        self._split, self._layout, self._artifact, self._views = split, layout, artifact, views
        self._guards, self._constants = stored.guards, stored.constants
        self._strides: dict[tuple[int, ...], list[tuple[int, ...]] | None] = {}

    def takes(self, tensors: Sequence[torch.Tensor], sizes_in: Sequence[int]) -> bool:
        """Return whether the artifact supports these arguments."""
        strides = self._strides_at(tuple(self._layout.values(tensors, sizes_in)))
        return strides is not None and strides == [tensor.stride() for tensor in tensors]

    def run(self, tensors: list[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        """Run the program on arguments that it takes. Empties the list: each tensor is freed after its last use."""
        arguments: list[Any] = [*self._layout.values(tensors, sizes_in), *tensors, *self._constants]
        viewed = [tensors[i] for i in self._split.inputs]
        tensors.clear()
        return self._views([*viewed, *self._artifact(arguments)], sizes_in)

    def _strides_at(self, values: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Return the strides that the tensors must have; None if the artifact does not support these sizes."""
        if values not in self._strides:
            if len(self._strides) >= _MAX_SIZES:
                self._strides.clear()
            supported = all(value >= MIN_DYNAMIC_SIZE for value in values) and (
                self._guards is None or program_compiler.hold(self._guards, values)
            )
            self._strides[values] = self._layout.strides_at(values) if supported else None
        return self._strides[values]
