"""Takes nested data apart into tensors and a schema, and puts it together again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

ORTModelInputOutputType: TypeAlias = Any  # tensors, None, str, int, bool, float, and sequences and mappings of these
ORTModelInputOutputSchemaType: TypeAlias = Any  # the same with a stub for each tensor


class PrimitiveType:
    """Python's numbers, as data that a graph may take."""

    _DTYPES: Mapping[type, torch.dtype] = {int: torch.int64, float: torch.float32, bool: torch.bool}

    @staticmethod
    def is_primitive_type(value: object) -> bool:
        """Whether it is an int, float or bool."""
        return type(value) in PrimitiveType._DTYPES

    @staticmethod
    def get_primitive_dtype(value: object) -> str:
        """The type as text; that of a bool has its value in it, since another value means another graph."""
        return f"{type(value)}_{value}" if isinstance(value, bool) else str(type(value))

    @staticmethod
    def create_tensor(value: float, device: torch.device | str | None = None) -> torch.Tensor:
        """A 0-dimensional tensor: int64, float32 or bool."""
        return torch.tensor(value, device=device, dtype=PrimitiveType._DTYPES[type(value)])


@dataclass(frozen=True)
class TensorStub:
    """Stands for a tensor in a schema.

    Attributes:
        tensor_idx: its place in the list of tensors.
        dtype: as text.
        shape_dims: its rank.
    """

    tensor_idx: int
    dtype: str
    shape_dims: int


def extract_data_and_schema(
    data: ORTModelInputOutputType, constant_as_tensor: bool = False, device: torch.device | str | None = None
) -> tuple[list[torch.Tensor], ORTModelInputOutputSchemaType]:
    """Takes data apart.

    Args:
        data: tensors, None, texts, numbers, and sequences, mappings and named tuples of them.
        constant_as_tensor: numbers become tensors, instead of staying in the schema.
        device: of those tensors.

    Returns:
        The tensors, depth first, and the schema: the data with a stub in the place of each tensor. Schemas compare
        equal where types and ranks do.

    Raises:
        TypeError: something else is in the data.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor, dtype: str) -> TensorStub:
        tensors.append(tensor)
        return TensorStub(len(tensors) - 1, dtype, tensor.dim())

    def schema(value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, torch.Tensor):
            return take(value, str(value.dtype))
        if PrimitiveType.is_primitive_type(value):
            if not constant_as_tensor:
                return value
            return take(PrimitiveType.create_tensor(value, device), PrimitiveType.get_primitive_dtype(value))
        return _rebuilt(value, schema)

    made = schema(data)
    return tensors, made


def unflatten_data_using_schema(
    data: Sequence[torch.Tensor], schema: ORTModelInputOutputSchemaType
) -> ORTModelInputOutputType:
    """Puts data together again.

    Args:
        data: the tensors.
        schema: of `extract_data_and_schema`.

    Raises:
        TypeError: something is in the schema that `extract_data_and_schema` does not put there.
    """

    def value(part: Any) -> Any:
        if part is None or isinstance(part, str) or PrimitiveType.is_primitive_type(part):
            return part
        if isinstance(part, TensorStub):
            return data[part.tensor_idx]
        return _rebuilt(part, value)

    return value(schema)


def _rebuilt(value: Any, of_each: Any) -> Any:
    """A sequence, mapping or named tuple of the same type with other contents."""
    if isinstance(value, Mapping):
        contents = {key: of_each(each) for key, each in value.items()}
        if type(value) is dict:
            return contents
        result = copy.copy(value)  # mappings may have a constructor of their own
        for key, each in contents.items():
            result[key] = each  # type: ignore[index]  # one that cannot be changed raises TypeError
        return result
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        items = [of_each(each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # type: ignore[call-arg]
    raise TypeError(
        f"Expected a tensor, None, str, int, float, bool, or a sequence or mapping of them, got {type(value).__name__}."
    )
