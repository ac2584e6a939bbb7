"""Record what one training step does on this rank: floating-point operations, collectives, and the bytes that it holds.

The tensors may be real or fake, and so may the process group: a recording of real processes and one of a simulation are
made by the same code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from onnxtrain.observe.memory import tensors_in
from onnxtrain.observe.memory_timeline import BANDS, held_by_band
from onnxtrain.torch_compat.modes import TorchDispatchMode
from onnxtrain.torch_compat.replacement import replaced

PARAMETERS, STATE, GRADIENTS, ACTIVATIONS, TEMPORARY = BANDS
GATHER, WAIT, REDUCE_SCATTER, ALL_REDUCE, COMPUTE = "all-gather", "wait", "reduce-scatter", "all-reduce", "compute"
COLLECTIVES = (GATHER, REDUCE_SCATTER, ALL_REDUCE)

_KINDS = {"_allgather_base_": GATHER, "_reduce_scatter_base_": REDUCE_SCATTER, "allreduce_": ALL_REDUCE}
_COPY_OUT = ("split_with_sizes_copy", "all_gather_copy_out")  # FSDP2 copies what it has gathered


@dataclass(frozen=True)
class Event:
    """A part of a step on one rank.

    Attributes:
        kind: "compute", one of COLLECTIVES, or "wait" for the oldest all-gather not waited for.
        phase: "forward" or "backward".
        flops: floating-point operations, of "compute".
        bytes: the size of the collective's larger side, which an all-gather writes and the others read.
        ranks: in the group of the collective.
        held: the bytes of each of BANDS when the most are held, since the last event.
    """

    kind: str
    phase: str
    held: tuple[int, ...]
    flops: int = 0
    bytes: int = 0
    ranks: int = 1

    @property
    def sent(self) -> int:
        """The bytes that a rank sends, by the algorithm over a ring."""
        rounds = 2 if self.kind == ALL_REDUCE else 1
        return rounds * self.bytes * (self.ranks - 1) // self.ranks


class StepRecorder(TorchDispatchMode):
    """Records the events of the operators under it.

    Args:
        replicas: the number of ranks in the groups of all-reduces.
    """

    def __init__(self, replicas: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._replicas, self._phase, self._flops = replicas, "forward", 0
        # By the id of the storage, whose Python object lives as long as it does: its band and its bytes.
        self._bands: dict[int, tuple[str, int]] = {}
        self._held = dict.fromkeys(BANDS, 0)
        self._peak: tuple[int, ...] = held_by_band(self._held)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operators of this context."""
        original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            key = id(storage)
            if key in self._bands:  # FSDP2 frees and reuses the storages of gathered parameters
                self._set(key, TEMPORARY, size)
            return result

        with replaced(torch.UntypedStorage, "resize_", resize), self:
            yield
            self._add(COMPUTE)

    def begin(self, phase: str) -> None:
        """Begin the next phase."""
        self._add(COMPUTE)
        self._phase = phase

    def hold(self, tensor: torch.Tensor, band: str) -> None:
        """Count a tensor's storage in a band, from now on."""
        key = id(tensor.untyped_storage())
        if key not in self._bands:
            weakref.finalize(tensor.untyped_storage(), self._release, key)
        self._set(key, band, tensor.untyped_storage().nbytes())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for tensor in tensors_in(result):
            if tensor.layout == torch.strided and id(tensor.untyped_storage()) not in self._bands:
                self.hold(tensor, ACTIVATIONS)
        if func.namespace == "c10d" and name in _KINDS:
            self._collective(_KINDS[name], args)
        elif func.namespace == "fsdp" and name in _COPY_OUT:
            self._add(COMPUTE)
            self._add(WAIT)
        elif (count := _flop_formula(func)) is not None:
            self._flops += count(*args, **(kwargs or {}), out_val=result)
        return result

    def _collective(self, kind: str, args: tuple[Any, ...]) -> None:
        output, source = (args[0][0],) * 2 if kind == ALL_REDUCE else args[:2]
        for tensor in (output, source):
            self.hold(tensor, GRADIENTS if kind != GATHER and tensor is output else TEMPORARY)
        larger, smaller = sorted((output.nbytes, source.nbytes), reverse=True)
        ranks = self._replicas if kind == ALL_REDUCE else larger // max(1, smaller)
        self._add(COMPUTE)
        self._add(kind, bytes=larger, ranks=ranks)

    def _add(self, kind: str, **facts: int) -> None:
        if kind == COMPUTE:
            facts, self._flops = {"flops": self._flops}, 0
        self.events.append(Event(kind, self._phase, self._peak, **facts))
        self._peak = held_by_band(self._held)

    def _set(self, key: int, band: str, size: int) -> None:
        self._drop(key)
        self._bands[key] = band, size
        self._held[band] += size
        if sum(self._held.values()) > sum(self._peak):
            self._peak = held_by_band(self._held)

    def _release(self, key: int) -> None:
        self._drop(key)
        self._bands.pop(key, None)

    def _drop(self, key: int) -> None:
        band, size = self._bands.get(key, (ACTIVATIONS, 0))
        self._held[band] -= size


def _flop_formula(func: Any) -> Callable[..., int] | None:
    """Return the function that counts an operator's operations, from its arguments; None if there is none."""
    packet = func.overloadpacket
    if (name := packet.__name__).startswith("_scaled_dot_product"):  # of those on a CPU, PyTorch counts none
        packet = getattr(torch.ops.aten, name.replace("_for_cpu", ""))
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula
