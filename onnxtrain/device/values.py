"""Tensors between numpy and onnxruntime, half precision among them.

numpy has no bfloat16 and no float8. Such arrays have the dtypes of the package ml_dtypes, which is asked for only where
one occurs. onnxruntime makes no OrtValue from texts: those go into a session as arrays.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from onnxruntime import OrtValue

from onnxtrain.errors import TrainingError

Array = npt.NDArray[Any]

# Types that numpy lacks, by the name that ml_dtypes gives them, with the number that ONNX gives them.
_BEYOND_NUMPY = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19}
_BEYOND_NUMPY_NAMES = {number: name for name, number in _BEYOND_NUMPY.items()}

_ONNX_NAMES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(float8e5m2)": "float8_e5m2",
}


def dtype_named(name: str) -> np.dtype[Any]:
    """The dtype of this name, bfloat16 and float8 included.

    Raises:
        TrainingError: the type needs the package ml_dtypes, and it is not installed.
        TypeError: there is no such type.
    """
    if name not in _BEYOND_NUMPY:
        return np.dtype(name)
    try:
        import ml_dtypes  # noqa: PLC0415  only where such a value occurs
    except ImportError as error:
        todo = "pip install ml_dtypes"
        raise TrainingError("numpy has no such type.", expected="the package ml_dtypes", got=name, todo=todo) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def numpy_name(onnx_type: str) -> str:
    """The name of the dtype that arrays for a session's `tensor(…)` have; `object` for texts."""
    if onnx_type == "tensor(string)":
        return "object"
    return _ONNX_NAMES.get(onnx_type) or onnx_type.removeprefix("tensor(").removesuffix(")")


def dtype_name(array: Array) -> str:
    """The name of the array's dtype; `object` for texts of any length."""
    return "object" if is_text(array) else _name(array.dtype)


@functools.lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # which numpy puts together anew each time, in microseconds


def is_text(array: Array) -> bool:
    return array.dtype.kind in "OU"


def to_ort(array: Array) -> OrtValue:
    """The array as an OrtValue on the CPU that shares its memory, where it is contiguous; else as a copy."""
    number = _BEYOND_NUMPY.get(_name(array.dtype))
    if number is None:
        return OrtValue.ortvalue_from_numpy(_bits(array))
    return OrtValue.ortvalue_from_numpy_with_onnx_type(_bits(array), number)


def write(array: Array, value: OrtValue) -> None:
    """Copies the array into the memory of a value with its type and shape, on any device."""
    value.update_inplace(_bits(array))


def _bits(array: Array) -> Array:
    """The array, contiguous, in a type that onnxruntime takes."""
    array = np.asarray(array, order="C")
    return array.view(f"uint{8 * array.itemsize}") if _name(array.dtype) in _BEYOND_NUMPY else array


def copied_to_ort(array: Array, device: str = "cpu", index: int = 0) -> OrtValue:
    """The array as an OrtValue with memory of its own: arrays taken from it stay valid without it."""
    element_type = to_ort(array).element_type()
    value = OrtValue.ortvalue_from_shape_and_type(array.shape, element_type, device, index)
    write(array, value)
    return value


def to_numpy(value: OrtValue) -> Array:
    """The tensor as an array: on the CPU it may share the value's memory, elsewhere it is a copy."""
    name = _BEYOND_NUMPY_NAMES.get(value.element_type())
    if name is None:
        array: Array = value.numpy()
        return array
    dtype = dtype_named(name)
    if value.device_name() != "cpu":
        source, value = value, OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type())
        value.update_inplace(source)
    memory = (ctypes.c_uint8 * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    # A copy: the array cannot keep the OrtValue alive.
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(value.shape()).copy()
