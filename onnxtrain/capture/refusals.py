"""What is known beforehand not to be a graph, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.four_bit_weights import is_four_bit, refuse_four_bit
from onnxtrain.capture.key.snapshot import PLAIN_TENSORS
from onnxtrain.capture.structure import Structure
from onnxtrain.errors import CaptureError, ORTModuleIOError, ORTModuleTorchModelException
from onnxtrain.graph import traversal
from onnxtrain.graph.values import MICROSOFT
from onnxtrain.torch_compat.dispatch import is_device_context
from onnxtrain.torch_compat.modes import dispatch_modes, forward_ad_level, function_modes, is_inside_transform

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


def refuse_call(tensors: Sequence[torch.Tensor]) -> None:
    """Raises where a graph cannot hold the call's tensors, or something else is to see each operator of the module.

    Raises:
        CaptureError: a transform, forward-mode differentiation or a mode is under way; a view that is negated lazily.
        ORTModuleIOError: a tensor of another layout, or of a class of its own.
    """
    if is_inside_transform():
        raise CaptureError(
            "the module is called inside a torch.func transform",
            todo="the module runs in PyTorch; call it outside of vmap, grad, jvp and their like",
        )
    if forward_ad_level() >= 0:
        raise CaptureError(
            "the module is called under forward-mode differentiation, which a graph does not carry",
            todo="the module runs in PyTorch; call it outside of torch.autograd.forward_ad.dual_level()",
        )
    modes = [type(mode).__qualname__ for mode in (*_function_modes(), *dispatch_modes())]
    if modes:
        raise CaptureError(
            "a mode is on that is to see each of the module's operators: a graph has others",
            got=_some(modes),
            todo="the module runs in PyTorch; leave the mode to have it captured",
        )
    for number, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_nested:
            raise ORTModuleIOError(
                f"input tensor {number} is of a kind that a graph cannot hold",
                expected="a torch.Tensor of strided layout, not nested",
                got=f"{type(tensor).__qualname__} of {tensor.layout}",
                todo="the module runs in PyTorch; convert the input",
            )
        if tensor.is_neg():  # compiled kernels read what lies in memory
            raise CaptureError(
                f"input tensor {number} is a view whose elements are negated when they are read, as z.conj().imag is",
                todo="the module runs in PyTorch; pass x.resolve_neg()",
            )


def refuse_numbers(structure: Structure, tensors: Sequence[torch.Tensor]) -> None:
    """Raises where the arguments are objects of numbers and no tensor: nothing would be left of them in a graph.

    Raises:
        ORTModuleIOError: names the classes.
    """
    classes = sorted({kind.__qualname__ for kind in structure.classes()})
    if classes and not tensors:
        raise ORTModuleIOError(
            "the arguments hold no tensor, and a graph computes with tensors",
            expected="at least one tensor among the arguments",
            got=_some(classes),
            todo="the module runs in PyTorch; pass tensors, or give the numbers to the module's constructor",
        )


def _function_modes() -> list[TorchFunctionMode]:
    """The modes that are on, but for the default device, which a capture takes as it is."""
    return [mode for mode in function_modes() if not is_device_context(mode)]


def refuse_module(module: torch.nn.Module, *, hooks_run_outside: bool = False) -> None:
    """Raises where the module has something that a graph would not run, or would run otherwise than eager does.

    Args:
        module: the module.
        hooks_run_outside: whether the module's own hooks, not those of its submodules, run around the graph.

    Raises:
        ORTModuleTorchModelException: the module is a DataParallel.
        CaptureError: names the submodules.
        QuantizationError: a quantized weight lacks what it is quantized with.
    """
    if isinstance(module, torch.nn.DataParallel):
        raise ORTModuleTorchModelException(
            "ORTModule cannot wrap torch.nn.DataParallel",
            got=type(module).__name__,
            todo="wrap the inner module with ORTModule, then use DistributedDataParallel",
        )
    named = list(module.named_modules())
    hooks = [
        f"{name or 'the module itself'} ({kind})"
        for name, submodule in (named[1:] if hooks_run_outside else named)
        for attribute, kind in _HOOKS.items()
        if not all(map(_is_harmless, getattr(submodule, attribute).values()))
    ]
    if hooks:
        raise CaptureError(
            "submodules have hooks, which a graph would not run",
            where=_some(hooks),
            todo="remove the hooks, or put them on the ORTModule itself",
        )
    special = [
        f"{name}: {type(parameter).__qualname__}"
        for name, parameter in module.named_parameters()
        if type(parameter) not in PLAIN_TENSORS and not is_four_bit(parameter)
    ]
    if special:
        raise CaptureError(
            "parameters are of a kind that a graph cannot hold",
            where=_some(special),
            todo="the module runs in PyTorch; wrap the module before its parameters are converted",
        )
    refuse_four_bit(module)
    packing = [name for name, submodule in named if _packs_padding(submodule)]
    if packing:
        raise CaptureError(
            "without gradients and in eval mode nn.TransformerEncoder leaves out padding, by nested tensors",
            where=_some(packing),
            todo="the module runs in PyTorch; enable_nested_tensor=False lets it be captured",
        )


def refuse_outside_tensor(tensor: torch.Tensor) -> None:
    """Refuses a tensor that forward reads and that is neither an argument nor the module's, where it needs a gradient.

    Raises:
        CaptureError: the graph would hold it as a constant, and its gradient would be lost.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CaptureError(
            "forward reads a tensor that needs a gradient and belongs neither to the module nor to the call",
            expected="parameters of the module, or arguments of forward",
            got=f"{type(tensor).__name__} {list(tensor.shape)} from a global, a closure or another object",
            todo="register it as a parameter of the module, or pass it to forward",
        )


def refuse_functions(model: ir.Model) -> None:
    """Raises where forward applies a custom autograd function.

    Raises:
        CaptureError: names the functions and the lines.
    """
    found = [
        f"{node.attributes.get_string('func_name')} ({traversal.origin(node)})"
        for node in model.graph
        if node.op_identifier()[:2] == (MICROSOFT, "PythonOp")
    ]
    if found:
        raise CaptureError(
            "forward applies custom autograd functions, and the option custom_autograd is off",
            where=_some(found),
            todo="the module runs in PyTorch; switch custom_autograd on to have it captured",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def runs_in_graph(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a hook of ours that a capture can run, and whose work becomes a part of the graph."""
    hook._onnxtrain_runs_in_graph = True  # type: ignore[attr-defined]  # read below
    return hook


def _is_harmless(hook: Callable[..., Any]) -> bool:
    """Whether a hook can run on fake tensors: one of ours, or one that only makes an output require a gradient.

    transformers leaves that one on the embeddings when gradient checkpointing is switched on.
    """
    if getattr(hook, "_onnxtrain_runs_in_graph", False):
        return True
    return hook.__module__ == "transformers.modeling_utils" and hook.__name__ == "make_inputs_require_grads"


def _packs_padding(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.TransformerEncoder)
        and module.enable_nested_tensor
        and not module.training
        and not torch.is_grad_enabled()
        and torch.backends.mha.get_fastpath_enabled()
    )


def one_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """The device of all tensors; 0-dimensional CPU tensors may be beside a GPU's.

    Raises:
        CaptureError: they are on several.
    """
    devices = {t.device for t in tensors if t.dim() > 0 or t.device.type != "cpu"}
    if len(devices) > 1:
        raise CaptureError(
            "the module's parameters and inputs are on several devices",
            got=", ".join(sorted(map(str, devices))),
            todo="move them to one device",
        )
    return next(iter(devices)) if devices else torch.device("cpu")
