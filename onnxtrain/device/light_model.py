"""Separate a model from the data of its large tensors, for blocks and ONNX's tools.

    light, tensors = hold_out(model)        tensors above 64 KiB are kept beside the model, in memory or on disk
    model = put_back(light, tensors)

A model of any size is then one small protobuf message. Its tensors are read once, when the checkpoint is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxtrain.errors import ArtifactError

Tensors = Mapping[str, ir.TensorProtocol]
_LARGE = 1 << 16  # bytes
_HELD = "onnxtrain: held beside the model"


def hold_out(
    model: onnx.ModelProto | ir.Model | str | os.PathLike[str], model_path: str | None = None
) -> tuple[onnx.ModelProto, Tensors]:
    """Separate a copy of the model from its large tensors.

    Args:
        model: a model or its path.
        model_path: the file that `model` was read from; needed for external data.

    Raises:
        ArtifactError: the file does not exist or is not an ONNX model.
    """
    if isinstance(model, ir.Model):
        return _hold_out_ir(model)
    if isinstance(model, onnx.ModelProto):
        proto, folder = model, Path(model_path).parent if model_path else Path.cwd()
    else:
        proto, folder = _read(Path(model)), Path(model).parent
    light = onnx.ModelProto()
    light.CopyFrom(_without_initializers(proto))
    tensors: dict[str, ir.TensorProtocol] = {}
    for tensor in proto.graph.initializer:
        if tensor.ByteSize() <= _LARGE and tensor.data_location != onnx.TensorProto.EXTERNAL:
            light.graph.initializer.append(tensor)
            continue
        tensors[tensor.name] = ir.serde.deserialize_tensor(tensor, folder)
        light.graph.initializer.append(_stub(tensor.name, tensor.data_type, tensor.dims))
    return light, tensors


def _read(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as error:
        raise ArtifactError(
            "The model file does not exist.", str(path), todo="pass the path of an .onnx file"
        ) from error
    except Exception as error:  # protobuf's exceptions differ between its versions
        raise ArtifactError("The file is not an ONNX model.", str(path), got=str(error)) from error
    if not model.HasField("graph"):
        raise ArtifactError("The file is not an ONNX model.", str(path), got=f"no graph in {path.stat().st_size} bytes")
    return model


def _without_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model without its initializers, whose data is not copied."""
    light = onnx.ModelProto()
    for field, value in proto.ListFields():
        if field.name != "graph":
            _copy(light, field.name, value)
    for field, value in proto.graph.ListFields():
        if field.name != "initializer":
            _copy(light.graph, field.name, value)
    return light


def _copy(target: object, name: str, value: object) -> None:
    present = getattr(target, name)
    if hasattr(present, "extend"):
        present.extend(value)
    elif hasattr(present, "CopyFrom"):
        present.CopyFrom(value)
    else:
        setattr(target, name, value)


def _hold_out_ir(model: ir.Model) -> tuple[onnx.ModelProto, Tensors]:
    tensors: dict[str, ir.TensorProtocol] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes > _LARGE:
            tensors[name] = tensor
            value.const_value = ir.ExternalTensor(_HELD, 0, 0, tensor.dtype, shape=_fixed(tensor.shape), name=name)
    try:
        light = ir.to_proto(model)
    finally:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor
    return light, tensors


def _fixed(shape: ir.ShapeProtocol) -> ir.Shape:
    return ir.Shape([int(size) for size in shape.numpy()])


def _stub(name: str, data_type: int, dims: Sequence[int]) -> onnx.TensorProto:
    stub = onnx.TensorProto(name=name, data_type=data_type, data_location=onnx.TensorProto.EXTERNAL)
    stub.dims.extend(dims)
    stub.external_data.add(key="location", value=_HELD)
    return stub


def is_stub(tensor: onnx.TensorProto) -> bool:
    """Return whether the data of a tensor is kept beside the model."""
    return any(entry.value == _HELD for entry in tensor.external_data)


def without_stubs(light: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a light model for ONNX's own tools, which would look for the files of stubs: stubs become inputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(light)
    stubs = [tensor for tensor in copy.graph.initializer if is_stub(tensor)]
    for tensor in stubs:
        copy.graph.initializer.remove(tensor)
        if tensor.name not in {v.name for v in copy.graph.input}:
            value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            copy.graph.input.append(value)
    return copy


def put_back(light: onnx.ModelProto, tensors: Tensors) -> ir.Model:
    """Return the model with its tensors, which are not copied."""
    model = ir.from_proto(light)
    for name, tensor in tensors.items():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = tensor
    return model


def with_data(tensor: onnx.TensorProto, held: ir.TensorProtocol | None) -> onnx.TensorProto:
    """Return the tensor with its data."""
    return tensor if held is None else ir.to_proto(ir.Tensor(held.numpy(), dtype=held.dtype, name=tensor.name))
