"""Checks around a capture: refuse calls, modules and graphs that cannot run, with the reason and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode

from onnxtrain.capture.four_bit_weights import is_four_bit, refuse_four_bit
from onnxtrain.capture.guards.assumed_answers import AssumedAnswer
from onnxtrain.capture.sharded.layout import is_sharded
from onnxtrain.capture.sharded.parameters import is_hook_of_style
from onnxtrain.capture.structure import PLAIN_TENSORS, Structure
from onnxtrain.errors import CaptureError, ORTModuleIOError, ORTModuleTorchModelException
from onnxtrain.graph import traversal
from onnxtrain.graph.values import ATEN, MICROSOFT
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Effects
from onnxtrain.torch_compat.dispatch import is_device_context
from onnxtrain.torch_compat.modes import dispatch_modes, forward_ad_level, function_modes, is_inside_transform

_HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}

_LAZY_DEVICES = ("lazy", "xla")


def refuse_call(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse a call with unsupported tensors, or inside a context that must see each operator of the module.

    Raises:
        CaptureError: a torch.func transform, forward-mode differentiation or a torch function or dispatch mode is
            active; or an input is a lazily negated view.
        ORTModuleIOError: an input is not strided, is nested, is a tensor subclass, or is on a lazy device.
    """
    if is_inside_transform():
        raise CaptureError(
            "the module is called inside a torch.func transform",
            todo="the module runs in PyTorch; call it outside of vmap, grad, jvp and their like",
        )
    if forward_ad_level() >= 0:
        raise CaptureError(
            "the module is called under forward-mode differentiation, which a graph does not support",
            todo="the module runs in PyTorch; call it outside of torch.autograd.forward_ad.dual_level()",
        )
    modes = [type(mode).__qualname__ for mode in (*_function_modes(), *dispatch_modes())]
    if modes:
        raise CaptureError(
            "a TorchFunctionMode or TorchDispatchMode is active, which would not see the operators inside a graph",
            expected="no active mode",
            got=_first_few(modes),
            todo="the module runs in PyTorch; call it outside of the mode",
        )
    for index, tensor in enumerate(tensors):
        if type(tensor) not in PLAIN_TENSORS or tensor.layout != torch.strided or tensor.is_nested:
            raise ORTModuleIOError(
                f"input tensor {index} is of a kind that a graph does not support",
                expected="a torch.Tensor of layout torch.strided, not nested",
                got=f"{type(tensor).__qualname__} of {tensor.layout}",
                todo="the module runs in PyTorch; convert the input to a plain dense tensor",
            )
        if tensor.device.type in _LAZY_DEVICES:
            raise ORTModuleIOError(
                f"input tensor {index} is on a device that records operators to compile them itself",
                expected="a device that runs each operator when it is called",
                got=str(tensor.device),
                todo="the module runs in PyTorch; for a graph, keep the module and its inputs on the CPU or a GPU",
            )
        if tensor.is_neg():  # compiled kernels read memory as it is
            raise CaptureError(
                f"input tensor {index} is a lazily negated view, such as z.conj().imag",
                todo="the module runs in PyTorch; pass x.resolve_neg()",
            )


def refuse_tensorless_call(structure: Structure, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse arguments that are objects with numbers and no tensor: a graph would embed all of them as constants.

    Raises:
        ORTModuleIOError: names the classes.
    """
    classes = sorted({kind.__qualname__ for kind in structure.classes()})
    if classes and not tensors:
        raise ORTModuleIOError(
            "the arguments contain no tensor, and a graph computes with tensors",
            expected="at least one tensor among the arguments",
            got=_first_few(classes),
            todo="the module runs in PyTorch; pass tensors, or give the numbers to the module's constructor",
        )


def _function_modes() -> list[TorchFunctionMode]:
    """Return the active function modes, except that of the default device, under which a capture runs."""
    return [mode for mode in function_modes() if not is_device_context(mode)]


def _refuse_torchscript(named: Sequence[tuple[str, torch.nn.Module]]) -> None:
    scripted = [
        name or "the module itself" for name, submodule in named if isinstance(submodule, torch.jit.ScriptModule)
    ]
    if scripted:
        raise CaptureError(
            "a TorchScript module cannot be captured",
            where=_first_few(scripted),
            expected="a torch.nn.Module that runs in Python",
            todo="the module runs in PyTorch; use the module from before torch.jit.script or torch.jit.trace",
        )


def refuse_module(module: torch.nn.Module, *, hooks_run_outside: bool = False) -> None:
    """Refuse a module with something that a graph would not run, or would run differently from eager.

    Args:
        module: the user's module.
        hooks_run_outside: whether the caller runs the hooks of `module` itself, but not those of its submodules,
            around the graph.

    Raises:
        ORTModuleTorchModelException: the module is a DataParallel.
        CaptureError: names the submodules.
        QuantizationError: a quantized weight lacks a part of its quantization state.
    """
    if isinstance(module, torch.nn.DataParallel):
        raise ORTModuleTorchModelException(
            "ORTModule cannot wrap torch.nn.DataParallel",
            got=type(module).__name__,
            todo="wrap the inner module with ORTModule, then use DistributedDataParallel",
        )
    named = list(module.named_modules())
    _refuse_torchscript(named)
    hooks = [
        f"{name or 'the module itself'} ({kind})"
        for name, submodule in (named[1:] if hooks_run_outside else named)
        for kind in dict.fromkeys(kind for kind, _ in uncapturable_hooks(submodule))
    ]
    if hooks:
        raise CaptureError(
            "submodules have hooks, which a graph would not run",
            where=_first_few(hooks),
            todo="the module runs in PyTorch; remove the hooks, or register them on the ORTModule itself",
        )
    subclasses = [
        f"{name}: {type(parameter).__qualname__}"
        for name, parameter in module.named_parameters()
        if type(parameter) not in PLAIN_TENSORS and not is_four_bit(parameter) and not is_sharded(parameter)
    ]
    if subclasses:
        raise CaptureError(
            "parameters are of a tensor class that a graph does not support",
            where=_first_few(subclasses),
            expected="torch.nn.Parameter, DTensor or bitsandbytes' Params4bit",
            todo="the module runs in PyTorch; wrap the module before its parameters are converted",
        )
    refuse_four_bit(module)
    packing = [name for name, submodule in named if _packs_padding(submodule)]
    if packing:
        raise CaptureError(
            "nn.TransformerEncoder skips padding by nested tensors in eval mode without gradients, which a graph does "
            "not support",
            where=_first_few(packing),
            todo="the module runs in PyTorch; construct the encoder with enable_nested_tensor=False",
        )


def refuse_outside_tensor(tensor: torch.Tensor) -> None:
    """Refuse a tensor that forward reads from outside the module and the call, if it requires a gradient.

    Raises:
        CaptureError: the graph would embed the tensor as a constant and lose its gradient.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CaptureError(
            "forward reads a tensor that requires a gradient and belongs neither to the module nor to the call",
            expected="parameters of the module, or arguments of forward",
            got=f"{type(tensor).__name__} {list(tensor.shape)} from a global, a closure or another object",
            todo="the module runs in PyTorch; register the tensor as a parameter of the module, or pass it to forward",
        )


def refuse_functions(model: ir.Model) -> None:
    """Refuse a graph that calls a custom autograd function.

    Raises:
        CaptureError: names the functions and their source locations.
    """
    functions = [
        f"{node.attributes.get_string('func_name')} ({traversal.origin(node)})"
        for node in model.graph
        if node.op_identifier()[:2] == (MICROSOFT, "PythonOp")
    ]
    if functions:
        raise CaptureError(
            "forward applies custom autograd functions, and the option custom_autograd is off",
            where=_first_few(functions),
            todo="the module runs in PyTorch; turn custom_autograd on to have it captured",
        )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def runs_in_graph(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook of onnxtrain's that can be captured: its operators become part of the graph."""
    hook._onnxtrain_runs_in_graph = True  # type: ignore[attr-defined]  # read below
    return hook


def uncapturable_hooks(module: torch.nn.Module) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the kind and the function of each hook of a module, without its submodules, that a graph would not run."""
    for attribute, kind in _HOOKS.items():
        for hook in getattr(module, attribute).values():
            if not runs_with_forward(hook):
                yield kind, hook


# By their module and name: hooks of libraries whose whole effect is what a capture sees.
_LIBRARY_HOOKS = frozenset(
    {
        ("transformers.modeling_utils", "make_inputs_require_grads"),  # on the embeddings, for gradient checkpointing
        ("transformers.utils.output_capturing", "output_capturing_hook"),  # collects the hidden states of a call
    }
)


def runs_with_forward(hook: Callable[..., Any]) -> bool:
    """Return whether a capture may run a hook with forward: one of onnxtrain's, of a parallel style or of a library."""
    if getattr(hook, "_onnxtrain_runs_in_graph", False) or is_hook_of_style(hook):
        return True
    return (hook.__module__, getattr(hook, "__name__", "")) in _LIBRARY_HOOKS


def _packs_padding(module: torch.nn.Module) -> bool:
    return (
        isinstance(module, torch.nn.TransformerEncoder)
        and module.enable_nested_tensor
        and not module.training
        and not torch.is_grad_enabled()
        and torch.backends.mha.get_fastpath_enabled()
    )


def common_device(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all tensors; 0-dimensional CPU tensors may accompany those on a GPU.

    Raises:
        CaptureError: the tensors are on several devices.
    """
    devices = {t.device for t in tensors if not _is_host_scalar(t)}
    if len(devices) > 1:
        raise CaptureError(
            "the module's parameters and inputs are on several devices",
            expected="one device",
            got=", ".join(sorted(map(str, devices))),
            todo="move the module and its inputs to one device",
        )
    return next(iter(devices)) if devices else torch.device("cpu")


def refuse_moved_results(results: Sequence[object], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a forward that returns a tensor on another device than that of the graph, whose results have one device.

    Args:
        results: what forward returned.
        inputs: the tensors of the call, the parameters and buffers.

    Raises:
        CaptureError: a result is on another device.
    """
    device = common_device(inputs)
    for result in results:
        if isinstance(result, torch.Tensor) and result.device != device and not _is_host_scalar(result):
            raise CaptureError(
                "forward returns a tensor on another device than its inputs",
                expected=str(device),
                got=str(result.device),
                todo="the module runs in PyTorch; move the result to that device outside of the module",
            )


def _is_host_scalar(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.device.type == "cpu"


def refuse_assumptions_between_ranks(graph: ir.Graph, assumed: Sequence[AssumedAnswer]) -> None:
    """Raise CaptureError if a rank whose answer is another would communicate again, in PyTorch, and wait for others."""
    exchanges = [node for node in graph if _communicates(node)]
    if assumed and exchanges:
        raise CaptureError(
            "forward branches on whether values are finite, and communicates with other ranks",
            where=assumed[0].where,
            expected="a call that each rank can run in PyTorch if its values are not finite",
            got=f"{len(exchanges)} collectives in the graph, such as {exchanges[0].op_type}",
            todo="the module runs in PyTorch; use torch.where in place of the branch",
        )


def _communicates(node: ir.Node) -> bool:
    if node.domain == ATEN:  # PyTorch's operators for collectives have the namespace c10d, or one that contains it
        return "c10d" in node.attributes.get_string("operator")
    return Effects.COLLECTIVE in definition_of(node).effects
