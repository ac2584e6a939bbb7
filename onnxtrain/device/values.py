"""Convert tensors between numpy and onnxruntime, including bfloat16 and float8.

numpy lacks these dtypes: such arrays have the dtypes of the package ml_dtypes, which is imported only when one occurs.
onnxruntime cannot create an OrtValue of strings: those are fed to sessions as arrays.
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

# Dtypes that numpy lacks: their name in ml_dtypes, and their number in ONNX.
_BEYOND_NUMPY = {"bfloat16": 16, "float8_e4m3fn": 17, "float8_e5m2": 19}
_BEYOND_NUMPY_NAMES = {number: name for name, number in _BEYOND_NUMPY.items()}

_ONNX_NAMES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float8e4m3fn)": "float8_e4m3fn",
    "tensor(float8e5m2)": "float8_e5m2",
}


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype with this name, including bfloat16 and float8.

    Raises:
        TrainingError: the dtype needs the package ml_dtypes, which is not installed.
        TypeError: the name is unknown.
    """
    if name not in _BEYOND_NUMPY:
        return np.dtype(name)
    try:
        import ml_dtypes  # noqa: PLC0415  an extra
    except ImportError as error:
        todo = "pip install ml_dtypes"
        raise TrainingError("numpy lacks this dtype.", expected="the package ml_dtypes", got=name, todo=todo) from error
    return np.dtype(getattr(ml_dtypes, name))


def numpy_name(onnx_type: str) -> str:
    """Return the numpy dtype name of a session's `tensor(…)`; `object` for strings."""
    if onnx_type == "tensor(string)":
        return "object"
    return _ONNX_NAMES.get(onnx_type) or onnx_type.removeprefix("tensor(").removesuffix(")")


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype; `object` for strings of any length."""
    return "object" if is_text(array) else _name(array.dtype)


@functools.lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return dtype.name  # numpy rebuilds it on each access, in microseconds


def is_text(array: Array) -> bool:
    return array.dtype.kind in "OU"


def to_ort(array: Array) -> OrtValue:
    """Convert an array to an OrtValue on the CPU that shares its memory; a non-contiguous array is copied."""
    number = _BEYOND_NUMPY.get(_name(array.dtype))
    if number is None:
        return OrtValue.ortvalue_from_numpy(_bits(array))
    return OrtValue.ortvalue_from_numpy_with_onnx_type(_bits(array), number)


def write(array: Array, value: OrtValue) -> None:
    """Copy an array to a value of the same dtype and shape, on any device."""
    value.update_inplace(_bits(array))


def _bits(array: Array) -> Array:
    """Return the array, contiguous, viewed as a dtype that onnxruntime supports."""
    array = np.asarray(array, order="C")
    return array.view(f"uint{8 * array.itemsize}") if _name(array.dtype) in _BEYOND_NUMPY else array


def copied_to_ort(array: Array, device: str = "cpu", index: int = 0) -> OrtValue:
    """Copy an array to an OrtValue with its own memory, which arrays taken from it keep alive."""
    element_type = to_ort(array).element_type()
    value = OrtValue.ortvalue_from_shape_and_type(array.shape, element_type, device, index)
    write(array, value)
    return value


def to_numpy(value: OrtValue) -> Array:
    """Convert an OrtValue to an array. On the CPU it may share the value's memory; otherwise it is a copy."""
    name = _BEYOND_NUMPY_NAMES.get(value.element_type())
    if name is None:
        return value.numpy()
    dtype = dtype_named(name)
    if value.device_name() != "cpu":
        source, value = value, OrtValue.ortvalue_from_shape_and_type(value.shape(), value.element_type())
        value.update_inplace(source)
    memory = (ctypes.c_uint8 * value.tensor_size_in_bytes()).from_address(value.data_ptr())
    # A copy: the array cannot keep the OrtValue alive.
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(value.shape()).copy()
