"""The result of `onnxruntime.training.onnxblock.base` and `empty_base`: the model behind an accessor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import onnx

from onnxtrain import onnxblock
from onnxtrain.errors import ArtifactError


class ModelAccessor:
    """A view of the model that blocks extend.

    Args:
        model: the model.
        model_path: the file that it was read from, or None.
    """

    def __init__(self, model: onnx.ModelProto, model_path: str | None = None) -> None:
        self.model = model
        self._path = model_path

    @property
    def path(self) -> str:
        """The file that the model was read from.

        Raises:
            ArtifactError: none is known.
        """
        if self._path is None:
            raise ArtifactError("The model has no path.", "ModelAccessor.path", todo="pass model_path to base")
        return self._path

    @property
    def has_path(self) -> bool:
        """Whether the file that the model was read from is known."""
        return self._path is not None


@contextlib.contextmanager
def base(model: onnx.ModelProto | str | os.PathLike[str], model_path: str | None = None) -> Iterator[ModelAccessor]:
    """Make blocks extend a copy of `model`, as `onnxtrain.onnxblock.base`; the accessor has the copy."""
    with onnxblock.base(model, model_path) as extended:
        yield ModelAccessor(extended, model_path)


@contextlib.contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Make blocks build a new graph, as `onnxtrain.onnxblock.empty_base`; the accessor has its model."""
    with onnxblock.empty_base(opset_version) as extended:
        yield ModelAccessor(extended)
