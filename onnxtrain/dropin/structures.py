"""Flatten nested data into tensors and a schema, and unflatten it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

ORTModelInputOutputType: TypeAlias = Any  # tensors, None, str, int, bool, float, and sequences and mappings of these
ORTModelInputOutputSchemaType: TypeAlias = Any  # the same, with a stub for each tensor


class PrimitiveType:
    """Python scalars that can be inputs of a graph."""

    _DTYPES: Mapping[type, torch.dtype] = {int: torch.int64, float: torch.float32, bool: torch.bool}

    @staticmethod
    def is_primitive_type(value: object) -> bool:
        """Return whether the value is an int, float or bool."""
        return type(value) in PrimitiveType._DTYPES

    @staticmethod
    def get_primitive_dtype(value: object) -> str:
        """Return the type as text, with the value of a bool, as each value of a bool has its own graph."""
        return f"{type(value)}_{value}" if isinstance(value, bool) else str(type(value))

    @staticmethod
    def create_tensor(value: float, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the value as a 0-d tensor of dtype int64, float32 or bool."""
        return torch.tensor(value, device=device, dtype=PrimitiveType._DTYPES[type(value)])


@dataclass(frozen=True)
class TensorStub:
    """A tensor's placeholder in a schema.

    Attributes:
        tensor_idx: the tensor's index in the list of tensors.
        dtype: its dtype, as text.
        shape_dims: its rank.
    """

    tensor_idx: int
    dtype: str
    shape_dims: int


def extract_data_and_schema(
    data: ORTModelInputOutputType, constant_as_tensor: bool = False, device: torch.device | str | None = None
) -> tuple[list[torch.Tensor], ORTModelInputOutputSchemaType]:
    """Flatten nested data.

    Args:
        data: tensors, None, strings, numbers, and sequences, mappings and named tuples of them.
        constant_as_tensor: convert numbers to tensors, instead of keeping them in the schema.
        device: the device of those tensors.

    Returns:
        The tensors, depth first, and the schema: the data with a stub for each tensor. Schemas are equal if structure,
        dtypes and ranks are.

    Raises:
        TypeError: the data contains a value of another type.
    """
    tensors: list[torch.Tensor] = []

    def stub(tensor: torch.Tensor, dtype: str) -> TensorStub:
        tensors.append(tensor)
        return TensorStub(len(tensors) - 1, dtype, tensor.dim())

    def schema(value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, torch.Tensor):
            return stub(value, str(value.dtype))
        if PrimitiveType.is_primitive_type(value):
            if not constant_as_tensor:
                return value
            return stub(PrimitiveType.create_tensor(value, device), PrimitiveType.get_primitive_dtype(value))
        return _map_container(value, schema)

    data_schema = schema(data)
    return tensors, data_schema


def unflatten_data_using_schema(
    data: Sequence[torch.Tensor], schema: ORTModelInputOutputSchemaType
) -> ORTModelInputOutputType:
    """Rebuild nested data from tensors and a schema.

    Args:
        data: the tensors.
        schema: returned by `extract_data_and_schema`.

    Raises:
        TypeError: the schema contains a value that `extract_data_and_schema` does not produce.
    """

    def value(part: Any) -> Any:
        if part is None or isinstance(part, str) or PrimitiveType.is_primitive_type(part):
            return part
        if isinstance(part, TensorStub):
            return data[part.tensor_idx]
        return _map_container(part, value)

    return value(schema)


def _map_container(value: Any, function: Any) -> Any:
    """Apply a function to the items of a sequence, mapping or named tuple; return a container of the same type."""
    if isinstance(value, Mapping):
        mapped = {key: function(item) for key, item in value.items()}
        if type(value) is dict:
            return mapped
        result = copy.copy(value)  # the constructor of a mapping may have other arguments
        for key, item in mapped.items():
            result[key] = item  # type: ignore[index]  # an immutable mapping raises TypeError
        return result
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
    raise TypeError(
        f"Expected a tensor, None, str, int, float, bool, or a sequence or mapping of them, got {type(value).__name__}."
    )
