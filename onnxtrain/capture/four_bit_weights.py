"""Make the 4-bit weights of bitsandbytes visible to torch.export.

A `Params4bit` keeps its quantization state (scales, code table) in a Python object, `weight.quant_state`, which
torch.export does not see: its tensors would become constants. During an export the weight is a plain parameter and
those tensors are parameters of the same module, so that they are graph inputs, with names such as
`layer.weight.quant_state.absmax`. A matmul with such a weight (`MatMul4Bit`) becomes the operator that bitsandbytes
itself runs for it, and so one MatMulBnb4.

This file does not import bitsandbytes: a program with such a weight has imported it.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain.errors import CaptureError, QuantizationError
from onnxtrain.ops.quantization.four_bit_matmul import NESTED_BLOCK

_BNB_MODULES = "bitsandbytes.nn.modules"
_RESTORE = "fix_4bit_weight_quant_state_from_module"  # every forward of bitsandbytes calls it first
_STATE = "quant_state"
_SINGLE_QUANTIZED = ("absmax",)
_DOUBLE_QUANTIZED = ("absmax", "offset", "state2.absmax", "state2.code")  # the scales are quantized, too


def is_four_bit(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is bitsandbytes' Params4bit."""
    return any(kind.__name__ == "Params4bit" and kind.__module__ == _BNB_MODULES for kind in type(tensor).__mro__)


def quantization_state(weight: torch.Tensor) -> Any:
    """Return the quantization state of a 4-bit weight; None if it is lost, and for any other tensor."""
    return getattr(weight, _STATE, None) if is_four_bit(weight) else None


def state_tensors(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a 4-bit weight's quantization state, by their attribute paths from the weight."""
    state = quantization_state(weight)
    if state is None:
        return {}
    paths = _DOUBLE_QUANTIZED if state.state2 is not None else _SINGLE_QUANTIZED
    return {f"{_STATE}.{path}": _state_tensor(state, path) for path in paths}


def _state_tensor(state: Any, path: str) -> Any:
    for attribute in path.split("."):
        state = getattr(state, attribute, None)
    return state


# Checks before the capture


def refuse_four_bit(module: torch.nn.Module) -> None:
    """Refuse 4-bit weights that are incomplete, or stored in a layout that MatMulBnb4 does not read.

    Raises:
        QuantizationError: a part of a quantization state is missing.
        CaptureError: the layout is not supported.
    """
    for weight in _four_bit_weights_of(module):
        _refuse_incomplete(weight)
        state = weight.state
        if getattr(state, "packing_format_for_cpu", False):
            raise CaptureError(
                "a 4-bit weight is packed for inference on a CPU, as bitsandbytes does when a layer is called in "
                "eval mode",
                where=weight.path,
                todo="the module runs in PyTorch; wrap the module before it is called in eval mode, or load it again",
            )
        if weight.parameter.dtype != torch.uint8:
            raise CaptureError(
                "a 4-bit weight is stored in an unsupported dtype",
                where=weight.path,
                expected="torch.uint8",
                got=weight.parameter.dtype,
                todo="the module runs in PyTorch; quantize with quant_storage=torch.uint8",
            )
        if state.state2 is not None and state.state2.blocksize != NESTED_BLOCK:
            raise CaptureError(
                "the scales of a double-quantized 4-bit weight have an unsupported block size",
                where=weight.path,
                expected=NESTED_BLOCK,
                got=state.state2.blocksize,
                todo="the module runs in PyTorch; quantize with bitsandbytes' default block size",
            )


def _refuse_incomplete(weight: _Weight) -> None:
    state = weight.state
    if state is None:
        raise QuantizationError(
            "a 4-bit weight has no quantization state, and cannot be dequantized without its scales",
            where=weight.path,
            expected=f"{_STATE} with absmax, shape, blocksize and quant_type",
            got="none",
            todo="quantize the layer (move it to its device: layer.to(device)), or load the checkpoint with its "
            f"{weight.path}.absmax and {weight.path}.quant_state__… entries",
        )
    is_double = state.state2 is not None or (state.absmax is not None and state.absmax.dtype == torch.uint8)
    paths = _DOUBLE_QUANTIZED if is_double else _SINGLE_QUANTIZED
    missing = [path for path in paths if not isinstance(_state_tensor(state, path), torch.Tensor)]
    if missing:
        raise QuantizationError(
            f"a {'double-quantized ' if is_double else ''}4-bit weight has an incomplete quantization state",
            where=weight.path,
            expected=", ".join(f"{_STATE}.{path}" for path in paths),
            got=f"no {', '.join(f'{_STATE}.{path}' for path in missing)}",
            todo="load the weight with its complete quantization state (nested_absmax, nested_quant_map and "
            "nested_offset in a checkpoint of bitsandbytes), or quantize the layer again",
        )


@dataclass(frozen=True)
class _Weight:
    """A 4-bit weight: parameter `name` of `module`; `path` is its qualified name in the captured module."""

    module: torch.nn.Module
    name: str
    path: str

    @property
    def parameter(self) -> torch.Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def state(self) -> Any:
        """The quantization state of the weight or, if it has lost that, of its module, as in bitsandbytes."""
        state = quantization_state(self.parameter)
        return state if state is not None else getattr(self.module, _STATE, None)


def _four_bit_weights_of(module: torch.nn.Module) -> list[_Weight]:
    return [
        _Weight(submodule, name, f"{path}.{name}" if path else name)
        for path, submodule in module.named_modules()
        for name, parameter in submodule._parameters.items()
        if parameter is not None and is_four_bit(parameter)
    ]


# During the capture


@contextmanager
def plain_four_bit_weights(module: torch.nn.Module) -> Iterator[Mapping[str, str]]:
    """Turn 4-bit weights and the tensors of their quantization states into plain parameters while this is held.

    Yields the names of those tensors in the module (`layer.weight.quant_state.absmax`) by their names in the export.
    """
    weights = _four_bit_weights_of(module)
    if not weights:
        yield {}
        return
    names: dict[str, str] = {}
    bnb_modules, owner = sys.modules[_BNB_MODULES], threading.get_ident()
    states = {(id(weight.module), weight.name): weight.state for weight in weights}
    original = getattr(bnb_modules, _RESTORE)

    def restore(submodule: torch.nn.Module) -> None:
        key = (id(submodule), "weight")
        if threading.get_ident() != owner or key not in states:
            original(submodule)
        else:
            setattr(submodule.weight, _STATE, _traced_state(submodule, "weight", states[key]))

    with ExitStack() as stack:
        for weight in weights:
            if quantization_state(weight.parameter) is None:
                setattr(weight.parameter, _STATE, weight.state)  # as bitsandbytes' forward does
            stack.enter_context(_as_plain_parameters(weight, names))
        stack.callback(setattr, bnb_modules, _RESTORE, original)
        setattr(bnb_modules, _RESTORE, restore)
        yield names


@contextmanager
def _as_plain_parameters(weight: _Weight, names: dict[str, str]) -> Iterator[None]:
    """Replace one weight by plain parameters, and add the names of its state's tensors to `names`."""
    parameters, quantized = weight.module._parameters, weight.parameter
    prefix = weight.path.removesuffix(weight.name)
    tensors = state_tensors(quantized)
    added = {_parameter_name(weight.name, path): tensor for path, tensor in tensors.items()}
    names.update({prefix + _parameter_name(weight.name, path): f"{weight.path}.{path}" for path in tensors})
    # A layer that is called in eval mode without gradients would pack its weight for inference.
    packs = weight.module.__dict__.get("support_avx512bf16_for_cpu")
    kind = type(weight.module)
    try:
        parameters[weight.name] = _plain_parameter(quantized)
        parameters.update({name: _plain_parameter(tensor) for name, tensor in added.items()})
        if packs:
            weight.module.__dict__["support_avx512bf16_for_cpu"] = False
        weight.module.__class__ = _with_cast_bias(weight.module)
        yield
    finally:
        parameters[weight.name] = quantized  # type: ignore[assignment]  # a Params4bit is a Parameter
        for name in added:
            parameters.pop(name, None)
        weight.module.__class__ = kind
        if packs:
            weight.module.__dict__["support_avx512bf16_for_cpu"] = packs


def _parameter_name(weight: str, path: str) -> str:
    return f"{weight}_{path.replace('.', '_')}"


def _plain_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().as_subclass(torch.Tensor), requires_grad=False)


def _traced_state(module: torch.nn.Module, name: str, state: Any) -> Any:
    """Copy a quantization state, with the plain parameters in place of its tensors."""
    traced = copy.copy(state)
    if state.state2 is not None:
        traced.state2 = copy.copy(state.state2)
    for path in _DOUBLE_QUANTIZED if state.state2 is not None else _SINGLE_QUANTIZED:
        *holder, attribute = path.split(".")
        parameter = module._parameters[_parameter_name(name, f"{_STATE}.{path}")]
        setattr(traced.state2 if holder else traced, attribute, parameter)
    return traced


def _with_cast_bias(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return a layer's class, with the bias read in the dtype that the layer computes in.

    bitsandbytes casts a bias of another dtype by an assignment to `bias.data`, which a graph would not repeat. For a
    frozen bias the results are the same. One that is trained changes its dtype, and remains refused.
    """
    kind, bias, dtype = type(module), module._parameters.get("bias"), getattr(module, "compute_dtype", None)
    if bias is None or bias.requires_grad or dtype is None or bias.dtype == dtype:
        return kind
    cast = property(lambda layer: layer._parameters["bias"].to(dtype))
    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "bias": cast}
    )


def matmul_4bit(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    state: Any = None,
) -> Any:
    """Compute `MatMul4Bit.apply` with the operator that it calls; return NotImplemented if it writes into `out`."""
    if out is not None:
        return NotImplemented
    operands = (a, b.view(-1, 1), state.shape)
    settings = (state.blocksize, state.quant_type, bias)
    gemm = torch.ops.bitsandbytes.gemm_4bit.default
    if state.state2 is None:
        return gemm(*operands, state.absmax, *settings)
    return gemm(*operands, state.state2.absmax, *settings, state.absmax, state.state2.code, state.offset)
