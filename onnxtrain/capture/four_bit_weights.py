"""Weights that bitsandbytes keeps in 4 bits, while a module is captured.

A `Params4bit` holds what it is quantized with in a Python object, `weight.quant_state`, which PyTorch's export does not
see: its tensors would become constants. For the time of an export the weight is a plain parameter and those tensors
are parameters beside it, so that the graph has them as inputs, under names like `layer.weight.quant_state.absmax`. A
product with such a weight (`MatMul4Bit`) becomes the operator that bitsandbytes itself runs for it, and so one
MatMulBnb4.

Nothing here imports bitsandbytes: whoever has such a weight has imported it.
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

_HOME = "bitsandbytes.nn.modules"
_RESTORE = "fix_4bit_weight_quant_state_from_module"  # which each forward of bitsandbytes calls first
_STATE = "quant_state"
_PLAIN = ("absmax",)
_NESTED = ("absmax", "offset", "state2.absmax", "state2.code")  # where the scales are quantized themselves


def is_four_bit(tensor: torch.Tensor) -> bool:
    """Whether a parameter is bitsandbytes' Params4bit."""
    return any(kind.__name__ == "Params4bit" and kind.__module__ == _HOME for kind in type(tensor).__mro__)


def quantization(weight: torch.Tensor) -> Any:
    """The object that holds what a 4-bit weight is quantized with; None for any other tensor, or where it is lost."""
    return getattr(weight, _STATE, None) if is_four_bit(weight) else None


def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a 4-bit weight is quantized with, by the way to each from the weight; none for other tensors."""
    state = quantization(weight)
    if state is None:
        return {}
    names = _NESTED if state.state2 is not None else _PLAIN
    return {f"{_STATE}.{name}": _found(state, name) for name in names}


def _found(state: Any, name: str) -> Any:
    for step in name.split("."):
        state = getattr(state, step, None)
    return state


# Before the capture


def refuse_four_bit(module: torch.nn.Module) -> None:
    """Raises where a 4-bit weight is not whole, or lies in memory as a graph does not read it.

    Raises:
        QuantizationError: what a weight is quantized with is missing.
        CaptureError: the weight is in another layout.
    """
    for weight in _weights(module):
        _refuse_incomplete(weight)
        state = weight.state
        if getattr(state, "packing_format_for_cpu", False):
            raise CaptureError(
                "a 4-bit weight is packed for inference on a CPU, which bitsandbytes did when the layer was called in "
                "eval mode",
                where=weight.where,
                todo="the module runs in PyTorch; wrap the module before it is called in eval mode, or load it again",
            )
        if weight.parameter.dtype != torch.uint8:
            raise CaptureError(
                "a 4-bit weight is stored as another element type",
                where=weight.where,
                expected="torch.uint8",
                got=weight.parameter.dtype,
                todo="the module runs in PyTorch; quantize with quant_storage=torch.uint8",
            )
        if state.state2 is not None and state.state2.blocksize != NESTED_BLOCK:
            raise CaptureError(
                "the scales of a 4-bit weight are quantized by blocks of another size",
                where=weight.where,
                expected=NESTED_BLOCK,
                got=state.state2.blocksize,
                todo="the module runs in PyTorch; quantize with bitsandbytes' own block size",
            )


def _refuse_incomplete(weight: _Weight) -> None:
    state = weight.state
    if state is None:
        raise QuantizationError(
            "a 4-bit weight has no quantization state: without its scales it means nothing",
            where=weight.where,
            expected=f"{_STATE} with absmax, shape, blocksize and quant_type",
            got="none",
            todo="quantize the layer (move it to its device: layer.to(device)), or load the checkpoint with its "
            f"{weight.where}.absmax and {weight.where}.quant_state__… entries",
        )
    nested = state.state2 is not None or (state.absmax is not None and state.absmax.dtype == torch.uint8)
    names = _NESTED if nested else _PLAIN
    missing = [name for name in names if not isinstance(_found(state, name), torch.Tensor)]
    if missing:
        what = "double-quantized 4-bit weight lacks what its scales" if nested else "4-bit weight lacks what it"
        raise QuantizationError(
            f"a {what} {'are' if nested else 'is'} quantized with",
            where=weight.where,
            expected=", ".join(f"{_STATE}.{name}" for name in names),
            got=f"no {', '.join(f'{_STATE}.{name}' for name in missing)}",
            todo="load the weight with its whole quantization state (nested_absmax, nested_quant_map and nested_offset "
            "in a checkpoint of bitsandbytes), or quantize the layer again",
        )


@dataclass(frozen=True)
class _Weight:
    """A 4-bit weight: parameter `name` of `module`, which stands at `where` in the whole."""

    module: torch.nn.Module
    name: str
    where: str

    @property
    def parameter(self) -> torch.Tensor:
        found = self.module._parameters[self.name]
        assert found is not None
        return found

    @property
    def state(self) -> Any:
        """From the weight, or from its module, where bitsandbytes looks if the weight has lost it."""
        found = quantization(self.parameter)
        return found if found is not None else getattr(self.module, _STATE, None)


def _weights(module: torch.nn.Module) -> list[_Weight]:
    return [
        _Weight(submodule, name, f"{path}.{name}" if path else name)
        for path, submodule in module.named_modules()
        for name, parameter in submodule._parameters.items()
        if parameter is not None and is_four_bit(parameter)
    ]


# During the capture


@contextmanager
def four_bit_weights(module: torch.nn.Module) -> Iterator[Mapping[str, str]]:
    """Lets an export of `module` see its 4-bit weights and what they are quantized with as plain parameters.

    Gives the names of the latter in the export, each with its name in the module (`layer.weight.quant_state.absmax`).
    """
    weights = _weights(module)
    if not weights:
        yield {}
        return
    names: dict[str, str] = {}
    home, owner = sys.modules[_HOME], threading.get_ident()
    shown = {(id(weight.module), weight.name): weight for weight in weights}
    original = getattr(home, _RESTORE)
    states = {place: weight.state for place, weight in shown.items()}

    def restore(submodule: torch.nn.Module) -> None:
        place = (id(submodule), "weight")
        if threading.get_ident() != owner or place not in shown:
            original(submodule)
        else:
            setattr(submodule.weight, _STATE, _traced(submodule, "weight", states[place]))

    with ExitStack() as stack:
        for weight in weights:
            if quantization(weight.parameter) is None:
                setattr(weight.parameter, _STATE, weight.state)  # as bitsandbytes' forward does
            stack.enter_context(_shown(weight, names))
        stack.callback(setattr, home, _RESTORE, original)
        setattr(home, _RESTORE, restore)
        yield names


@contextmanager
def _shown(weight: _Weight, names: dict[str, str]) -> Iterator[None]:
    """One weight as plain parameters."""
    own, before = weight.module._parameters, weight.parameter
    prefix = weight.where.removesuffix(weight.name)
    beside = {_beside(weight.name, way): tensor for way, tensor in parts(before).items()}
    names.update({prefix + _beside(weight.name, way): f"{weight.where}.{way}" for way in parts(before)})
    # Called in eval mode without gradients, a layer would turn its weight into another layout.
    packs = weight.module.__dict__.get("support_avx512bf16_for_cpu")
    try:
        own[weight.name] = _plain(before)
        own.update({name: _plain(tensor) for name, tensor in beside.items()})
        if packs:
            weight.module.__dict__["support_avx512bf16_for_cpu"] = False
        yield
    finally:
        own[weight.name] = before  # type: ignore[assignment]  # a Params4bit is a Parameter
        for name in beside:
            own.pop(name, None)
        if packs:
            weight.module.__dict__["support_avx512bf16_for_cpu"] = packs


def _beside(name: str, way: str) -> str:
    return f"{name}_{way.replace('.', '_')}"


def _plain(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach().as_subclass(torch.Tensor), requires_grad=False)


def _traced(module: torch.nn.Module, name: str, state: Any) -> Any:
    """The quantization state with the tensors that the export has in their places."""
    found = copy.copy(state)
    if state.state2 is not None:
        found.state2 = copy.copy(state.state2)
    for way in _NESTED if state.state2 is not None else _PLAIN:
        *steps, last = way.split(".")
        setattr(found.state2 if steps else found, last, module._parameters[_beside(name, f"{_STATE}.{way}")])
    return found


def matmul_4bit(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    state: Any = None,
) -> Any:
    """What `MatMul4Bit.apply` computes, by the operator that it calls; NotImplemented where it writes into `out`."""
    if out is not None:
        return NotImplemented
    fixed = (a, b.view(-1, 1), state.shape)
    how = (state.blocksize, state.quant_type, bias)
    product = torch.ops.bitsandbytes.gemm_4bit.default
    if state.state2 is None:
        return product(*fixed, state.absmax, *how)
    return product(*fixed, state.state2.absmax, *how, state.absmax, state.state2.code, state.offset)
