"""What besides the structure of a call decides which capture serves it.

Three parts, each read on every call: `environment()` (autocast, grad mode and other switches of PyTorch),
`tensor_facts()` of each input, and the state of the module and its surroundings: `ModuleState`, a snapshot of what
forward can read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch.backends import mha

from onnxtrain.capture.key.self_check import notices_each_change
from onnxtrain.capture.key.snapshot import Reads, Snapshot, attribute_reads
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.capture.structure import PLAIN_TENSORS
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
    "environment",
    "environment_difference",
    "tensor_difference",
    "tensor_facts",
]

# The environment

_SWITCHES = (
    "grad mode", "inference mode", "autocast", "autocast cache", "default dtype", "flash attention",
    "memory-efficient attention", "math attention", "cuDNN attention", "sums of math attention in half precision",
    "float32 matmul precision", "deterministic algorithms", "deterministic algorithms warn only",
    "fast path of attention layers", "torch.func transforms", "forward-mode differentiation",
    "default device or mode", "dispatch modes",
)  # fmt: skip


def environment() -> tuple[Hashable, ...]:
    """The switches of PyTorch, in this thread and now, that forward may depend on."""
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
    )


def environment_difference(old: Sequence[Hashable], new: Sequence[Hashable]) -> str:
    """In words, the first switch that is not the same; "" where all are."""
    for name, before, after in zip(_SWITCHES, old, new, strict=True):
        if before != after:
            return f"{name}: {before} → {after}"
    return ""


def _autocast() -> Hashable:
    return tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def _function_modes() -> Hashable:
    """`torch.set_default_device` is such a mode. With any other the module runs in PyTorch: its class is enough."""
    return tuple(m.device if is_device_context(m) else type(m) for m in function_modes())


def _dispatch_modes() -> Hashable:
    return tuple(map(type, dispatch_modes()))


# Inputs

_FACTS = (
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
    """What a capture depends on in an input, other than its sizes."""
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
    """In words, the first of the facts of an input that is not the same; "" where all are."""
    for name, before, after in zip(_FACTS, old, new, strict=True):
        if before != after:
            return f"{name}: {_word(before)} → {_word(after)}"
    return ""


def _word(fact: Hashable) -> str:
    return fact.__qualname__ if isinstance(fact, type) else str(fact)


def _memory_format(tensor: torch.Tensor) -> Hashable:
    """`channels_last`, or which dimensions are outer to which and which are expanded."""
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
    """A module as it was at a capture: classes, attributes, training flags, hooks, and the facts of every tensor.

    Checking one costs microseconds: a function is generated from the snapshot that compares by identity what can be
    compared so, and gives the module's tensors as it finds them on the way. Where the identity of a mutable object
    changed, a second snapshot decides whether a value changed; if none did, it takes the place of the first.

    Attributes:
        names, reads: see `take`.
        snapshot: the state, and the module's tensors as they were.
        check: what `read` does, but False where only `look_again` can tell.
    """

    def __init__(
        self, module: torch.nn.Module, names: Sequence[str], reads: Reads | None, constants: Sequence[torch.Tensor]
    ) -> None:
        self.names = tuple(names)
        self.reads = reads
        self._constants = constants
        self.snapshot = self._look(module)
        self.check: Check = self._first_check

    @classmethod
    def take(
        cls,
        module: torch.nn.Module,
        names: Sequence[str] = (),
        reads: Reads | None = None,
        constants: Sequence[torch.Tensor] = (),
    ) -> ModuleState:
        """The state of `module` now.

        Args:
            module: any module but a TorchScript one.
            names: which tensors `read` gives: parameters, buffers and tensor attributes by their qualified names, those
                from outside as `Surroundings` names them.
            reads: the attributes that forward reads, as found by `attribute_reads`; None for all. Then what lies
                outside of the module is not looked at.
            constants: tensors whose elements the graph holds.
        """
        return cls(module, names, reads, constants)

    def _look(self, module: torch.nn.Module) -> Snapshot:
        found = Snapshot(module, self.names, self.reads)
        if self.reads is not None:
            Surroundings(module, self.reads).watch(found)
        found.constants(self._constants)
        return found

    def read(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """The tensors of `names` as they are now; None if the module is not in this state.

        Raises:
            CaptureError: the module does not have a tensor of `names`.
        """
        found = self.check(module)
        return self.look_again(module) if found is False else found

    def now(self, module: torch.nn.Module) -> Snapshot | None:
        """The module as it is now; None if it is not in this state."""
        found = self._look(module)
        return None if self.snapshot.changed(found) is not None else found

    def matches(self, module: torch.nn.Module) -> bool:
        """Whether the module is in this state."""
        return self.read(module) is not None

    def change(self, module: torch.nn.Module) -> tuple[str, str] | None:
        """What and where is the first thing that is not as it was; None where all is."""
        return self.snapshot.changed(self._look(module))

    def difference(self, module: torch.nn.Module) -> str:
        """In words, the first thing that is not as it was; "" where all is."""
        if module is not self.snapshot.module:
            return "the module is another object"
        now = self._look(module)
        place = self.snapshot.changed(now)
        if place is None:
            return ""
        before, after = self.snapshot.facts.get(place), now.facts.get(place)
        what, where = place
        return f"{what} of {where}: {before.text if before else 'absent'} → {after.text if after else 'absent'}"

    def _first_check(self, module: torch.nn.Module) -> Any:
        if module is not self.snapshot.module:
            return None
        self.check = _compile(self.snapshot) if sees_each_change() else _unsure
        return self.check(module)

    def look_again(self, module: torch.nn.Module) -> list[torch.Tensor] | None:
        """What `read` gives where an object was exchanged: the state is the same if every value is."""
        now = self.now(module)
        if now is None:
            return None
        self.snapshot = now
        self.check = self._first_check
        return now.named_tensors()


Check: TypeAlias = Callable[[torch.nn.Module], Any]


def _compile(snapshot: Snapshot) -> Check:
    source = snapshot.source()
    exec(_code(source), snapshot.values)
    check: Check = snapshot.values["check"]
    return check


def _unsure(module: torch.nn.Module) -> bool:
    return False


@functools.cache
def sees_each_change() -> bool:
    """Whether a generated check notices each kind of change on this Python and PyTorch. If not, facts decide alone."""

    def watch(module: torch.nn.Module) -> Callable[[], bool]:
        snapshot = Snapshot(module, ["weight", "mean"], None)
        Surroundings(module, {(id(module), "reader")}).watch(snapshot)
        check = _compile(snapshot)
        return lambda: isinstance(check(module), list)

    return notices_each_change(watch)


@functools.lru_cache(maxsize=64)
def _code(source: str) -> CodeType:
    """An exchanged object changes the values, not the source: it is not compiled again."""
    return compile(source, "<onnxtrain module state>", "exec")
