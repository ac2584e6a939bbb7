"""The key of a call: besides its structure, everything that decides which capture is valid for it.

The key has three parts, each read on every call: `environment()` (autocast, grad mode and other switches of PyTorch),
`tensor_facts()` of each input, and `ModuleState`, the state of the module and its surroundings that forward can read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch.backends import mha

from onnxtrain.capture.key.attribute_accesses import attribute_reads
from onnxtrain.capture.key.self_check import detects_each_kind_of_change
from onnxtrain.capture.key.snapshot import Reads, Snapshot
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.capture.structure import PLAIN_TENSORS
from onnxtrain.system import ranks
from onnxtrain.torch_compat.dispatch import count_function_modes, is_any_autocast_enabled, is_device_context
from onnxtrain.torch_compat.modes import (
    count_dispatch_modes,
    dispatch_modes,
    forward_ad_level,
    function_modes,
    kernel_switches,
    transform_level,
)

__all__ = [
    "ModuleState",
    "attribute_reads",
    "call_difference",
    "environment",
    "environment_difference",
    "tensor_difference",
    "tensor_facts",
]

# The environment

_SWITCHES = (
    "grad mode", "inference mode", "autocast", "autocast cache", "default dtype", "flash attention",
    "memory-efficient attention", "math attention", "cuDNN attention", "reduced-precision math attention",
    "float32 matmul precision", "deterministic algorithms", "deterministic algorithms warn only",
    "fast path of attention layers", "torch.func transforms", "forward-mode differentiation",
    "default device or mode", "dispatch modes", "process group of several ranks",
)  # fmt: skip


def environment() -> tuple[Hashable, ...]:
    """Return the current switches of PyTorch in this thread that a capture may depend on."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _autocast() if is_any_autocast_enabled() else None,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        *kernel_switches(),
        mha.get_fastpath_enabled(),
        transform_level(),
        forward_ad_level(),
        _function_modes() if count_function_modes() else None,
        _dispatch_modes() if count_dispatch_modes() else None,
        ranks.has_peers(),  # decides whether backward releases gradients early
    )


def environment_difference(old: Sequence[Hashable], new: Sequence[Hashable]) -> str:
    """Describe the first switch that differs; "" if none does."""
    for name, before, after in zip(_SWITCHES, old, new, strict=True):
        if before != after:
            return f"{name}: {before} → {after}"
    return ""


def _autocast() -> Hashable:
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _function_modes() -> Hashable:
    """Describe the function modes: the device of `torch.set_default_device`, and the class of any other mode.

    Under any other mode the module runs in PyTorch, so that its class is enough.
    """
    return tuple(m.device if is_device_context(m) else type(m) for m in function_modes())


def _dispatch_modes() -> Hashable:
    return tuple(map(type, dispatch_modes()))


# Inputs

_FACT_NAMES = (
    "type",
    "dtype",
    "device",
    "requires_grad",
    "number of dimensions",
    "memory format",
    "inference tensor",
    "negated view",
)


def tensor_facts(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what a capture depends on in an input, except its sizes."""
    kind = type(tensor)
    return (
        torch.Tensor if kind in PLAIN_TENSORS else kind,
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.ndim,
        "contiguous" if tensor.is_contiguous() else _memory_format(tensor),
        tensor.is_inference(),
        tensor.is_neg(),
    )


def tensor_difference(old: Sequence[Hashable], new: Sequence[Hashable]) -> str:
    """Describe the first fact of an input that differs; "" if none does."""
    for name, before, after in zip(_FACT_NAMES, old, new, strict=True):
        if before != after:
            return f"{name}: {_spell(before)} → {_spell(after)}"
    return ""


def call_difference(old: Any, new: Any) -> str:
    """Describe how the key of a call (structure, environment, facts of each tensor) differs from an earlier one's."""
    (structure, environment, *facts), (new_structure, new_environment, *new_facts) = old, new
    by_tensor = zip(new_structure.names, facts, new_facts, strict=False)
    of_tensors = (f"{name}: {text}" for name, *both in by_tensor if (text := tensor_difference(*both)))
    of_call = structure.difference(new_structure) or environment_difference(environment, new_environment)
    return of_call or next(of_tensors, "")


def _spell(fact: Hashable) -> str:
    return fact.__qualname__ if isinstance(fact, type) else str(fact)


def _memory_format(tensor: torch.Tensor) -> Hashable:
    """Return the memory format, or the order of the strides and the expanded dimensions."""
    if tensor.layout != torch.strided or type(tensor) not in PLAIN_TENSORS:
        return str(tensor.layout)
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.ndim), key=lambda d: -strides[d]))
    expanded = tuple(d for d, stride in enumerate(strides) if stride == 0 and tensor.shape[d] > 1)
    return "strided", order, expanded


# The module


class ModuleState:
    """The state of a module at a capture: classes, attributes, training flags, hooks, and the facts of every tensor.

    Checking it takes microseconds: a function is generated from the snapshot that compares objects by identity, and
    returns the module's tensors that it reads on the way. If a mutable object was replaced, a second snapshot decides
    whether a value has changed; if none has, the second snapshot replaces the first.

    Args:
        module: any module. For a TorchScript module, only the class is compared: no graph is captured from it.
        names: the tensors that `read` returns: parameters, buffers and tensor attributes by their qualified names,
            tensors from outside the module by their paths in `Surroundings`.
        reads: the attributes that forward reads, as found by `attribute_reads`; None stands for all attributes, and
            for no surroundings.
        constants: tensors whose values the graph embeds.

    Attributes:
        names, reads: as given.
        snapshot: the state, with the module's tensors.
        check: as `read`, but returns False if only a second snapshot can tell.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        names: Sequence[str] = (),
        reads: Reads | None = None,
        constants: Sequence[torch.Tensor] = (),
    ) -> None:
        self.names = tuple(names)
        self.reads = reads
        self._constants = constants
        self.snapshot = self._take_snapshot(module)
        self.check: Check = self._first_check

    def _take_snapshot(self, module: torch.nn.Module) -> Snapshot:
        snapshot = Snapshot(module, self.names, self.reads)
        if self.reads is not None:
            Surroundings(module, self.reads).add_to(snapshot)
        snapshot.add_constants(self._constants)
        return snapshot

    def read(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """Return the current tensors of `names`; None if the state of the module has changed.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        tensors = self.check(module)
        return self._recheck(module) if tensors is False else tensors

    def current_snapshot(self, module: torch.nn.Module) -> Snapshot | None:
        """Return a new snapshot of the module; None if its state has changed."""
        snapshot = self._take_snapshot(module)
        return None if self.snapshot.first_change(snapshot) is not None else snapshot

    def matches(self, module: torch.nn.Module) -> bool:
        """Return whether the module is in this state."""
        return self.read(module) is not None

    def first_change(self, module: torch.nn.Module) -> tuple[str, str] | None:
        """Return the name and owner of the first fact that has changed; None if none has."""
        return self.snapshot.first_change(self._take_snapshot(module))

    def difference(self, module: torch.nn.Module) -> str:
        """Describe the first fact that has changed; "" if none has."""
        if module is not self.snapshot.module:
            return "the module is another object"
        current = self._take_snapshot(module)
        change = self.snapshot.first_change(current)
        if change is None:
            return ""
        before, after = self.snapshot.facts.get(change), current.facts.get(change)
        name, owner = change
        return f"{name} of {owner}: {before.text if before else 'absent'} → {after.text if after else 'absent'}"

    def _first_check(self, module: torch.nn.Module) -> Any:
        if module is not self.snapshot.module:
            return None
        self.check = _compile(self.snapshot) if detects_every_change() else _always_uncertain
        return self.check(module)

    def _recheck(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """Do the work of `read` if an object was replaced: the state is the same if all values are."""
        current = self.current_snapshot(module)
        if current is None:
            return None
        self.snapshot = current
        self.check = self._first_check
        return current.named_tensors()


Check: TypeAlias = Callable[[torch.nn.Module], Any]


def _compile(snapshot: Snapshot) -> Check:
    source = snapshot.source()
    exec(_code(source), snapshot.values)
    check: Check = snapshot.values["check"]
    return check


def _always_uncertain(module: torch.nn.Module) -> bool:
    return False


@functools.cache
def detects_every_change() -> bool:
    """Return whether a generated check works on this version of Python and PyTorch; if not, the facts decide alone."""

    def compile_check(module: torch.nn.Module) -> Callable[[], bool]:
        snapshot = Snapshot(module, ["weight", "mean"], None)
        Surroundings(module, {(id(module), "reader")}).add_to(snapshot)
        check = _compile(snapshot)
        return lambda: isinstance(check(module), list)

    return detects_each_kind_of_change(compile_check)


@functools.lru_cache(maxsize=64)
def _code(source: str) -> CodeType:
    """Compile a check; cached, because a replaced object changes the values in the scope and not the source."""
    return compile(source, "<onnxtrain module state>", "exec")
