"""Flattening and unflattening of nested data, tables, dtypes, NVTX ranges."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from onnxtrain.dropin import dtypes
from onnxtrain.dropin.ptable import PTable
from onnxtrain.dropin.structures import PrimitiveType, extract_data_and_schema, unflatten_data_using_schema
from onnxtrain.observe import nvtx

Pair = namedtuple("Pair", ["left", "right"])
A, B, C = torch.ones(2), torch.zeros(3, 1), torch.tensor(5)


@pytest.mark.parametrize(
    ("data", "tensors"),
    [
        (A, [A]),
        (None, []),
        ("text", []),
        ([], []),
        ({}, []),
        ((A, [B, (C,)]), [A, B, C]),
        ({"a": A, "b": {"c": [B, None]}, "d": "text"}, [A, B]),
        (Pair(A, Pair(None, B)), [A, B]),
        ([A, A], [A, A]),
        (OrderedDict(z=A, a=B), [A, B]),
        ([1, 2.5, True, {"n": -1}], []),
        (BaseModelOutput(last_hidden_state=A, hidden_states=(B, C)), [A, B, C]),
    ],
)
def test_round_trip(data: Any, tensors: list[torch.Tensor]) -> None:
    extracted, schema = extract_data_and_schema(data)
    assert len(extracted) == len(tensors)
    assert all(a is b for a, b in zip(extracted, tensors, strict=True))
    again = unflatten_data_using_schema(extracted, schema)
    assert type(again) is type(data)
    assert extract_data_and_schema(again)[1] == schema
    assert repr(again) == repr(data)


def test_the_data_is_not_modified() -> None:
    output = BaseModelOutput(last_hidden_state=A)
    extract_data_and_schema(output)
    assert output.last_hidden_state is A


@pytest.mark.parametrize(("value", "dtype"), [(3, torch.int64), (0.5, torch.float32), (True, torch.bool)])
def test_numbers_as_tensors(value: float, dtype: torch.dtype) -> None:
    extracted, schema = extract_data_and_schema([value, A], constant_as_tensor=True, device="cpu")
    assert (extracted[0].dtype, extracted[0].item(), extracted[0].dim()) == (dtype, value, 0)
    again = unflatten_data_using_schema([torch.tensor(9), B], schema)
    assert [t.tolist() for t in again] == [9, B.tolist()]


def test_schemas_differ_if_the_graphs_would() -> None:
    def schema(data: Any) -> Any:
        return extract_data_and_schema(data, constant_as_tensor=True)[1]

    assert schema([A, 1, True]) == schema([A + 1, 2, True])
    assert schema([True]) != schema([False])
    assert schema([A]) != schema([A.long()])
    assert schema([A]) != schema([A.unsqueeze(0)])
    assert schema([A]) != schema((A,))
    assert PrimitiveType.get_primitive_dtype(True) == "<class 'bool'>_True"
    assert PrimitiveType.get_primitive_dtype(1) == "<class 'int'>"
    assert not PrimitiveType.is_primitive_type("1")


@pytest.mark.parametrize("wrong", [object(), {1, 2}, b"bytes", [torch.float32], 1j])
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=type(wrong[0] if isinstance(wrong, list) else wrong).__name__):
        extract_data_and_schema({"x": wrong})
    with pytest.raises(TypeError):
        unflatten_data_using_schema([], [wrong])


def test_tables() -> None:
    table, notes = PTable(sortable=True), PTable()
    assert table.get_string() == ""
    table.add_row(["memory", "on", 12])
    table.add_row(["graph", "off"]).append_annotation_table(notes)
    notes.add_row(["because", "x"])
    assert table.get_string() == "graph   off\n  because  x\nmemory  on   12\n"
    assert table.get_string(8, 5).splitlines()[2] == "memory    on     12"
    unsorted = PTable()
    for word in "ba":
        unsorted.add_row([word])
    assert unsorted.get_string() == "b\na\n"


@pytest.mark.parametrize(
    ("name", "dtype", "onnx_type"),
    [
        ("Float", torch.float32, onnx.TensorProto.FLOAT),
        ("Long", torch.int64, onnx.TensorProto.INT64),
        ("BFloat16", torch.bfloat16, onnx.TensorProto.BFLOAT16),
        ("Bool", torch.bool, onnx.TensorProto.BOOL),
        ("ComplexFloat", torch.complex64, onnx.TensorProto.COMPLEX64),
    ],
)
def test_types(name: str, dtype: torch.dtype, onnx_type: int) -> None:
    assert dtypes.pytorch_type_to_onnx_dtype(name) == onnx_type
    assert dtypes.pytorch_type_to_onnx_dtype(dtype) == onnx_type
    assert dtypes.onnx_dtype_to_pytorch_dtype(onnx_type) is dtype
    assert dtypes.pytorch_scalar_type_to_pytorch_dtype(name) is dtype


@pytest.mark.parametrize(
    "ask",
    [
        lambda: dtypes.pytorch_type_to_onnx_dtype("Quux"),
        lambda: dtypes.pytorch_type_to_onnx_dtype(torch.qint8),
        lambda: dtypes.onnx_dtype_to_pytorch_dtype(onnx.TensorProto.STRING),
        lambda: dtypes.onnx_dtype_to_pytorch_dtype(999),
    ],
)
def test_types_without_a_counterpart(ask: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        ask()


def test_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("end"))

    @nvtx.nvtx_function_decorator
    def divide(a: int, b: int) -> float:
        """Doc."""
        return a / b

    assert divide(4, b=2) == 2
    assert divide.__doc__ == "Doc."
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    nvtx.torch_nvtx_range_push("mine")
    nvtx.torch_nvtx_range_pop()
    name = "test_ranges.<locals>.divide"
    assert calls == [name, "end", name, "end", "mine", "end"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert divide(4, 1) == 4
    assert len(calls) == 6
