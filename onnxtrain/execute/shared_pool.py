"""The memory pool of a module's recordings: which memory each may overwrite, and when it may be replayed.

    forward a ──> kept a ──> backward a ──> gradients a       sizes a: kept a is reserved while backward a is recorded
    forward b ──> kept b ──> backward b ──> gradients b       sizes b: in the memory of sizes a, which is no longer read

A recording may overwrite all memory of the pool that was not reserved when it was recorded. The results of a recording
are reserved until another one is made while nothing shares their memory. The pool therefore holds the memory of one
step at its largest sizes, not the sum over all recordings.

A replay must not overwrite what is still read: while a result is alive, only those recordings are replayed that were
made while it was reserved. A call that would need another one gets a recording with memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from onnxtrain.execute.recorded_results import ResultMemory

WithoutOwner = Callable[[torch.Tensor], torch.Tensor]


class PoolShare:
    """The results of one recording in a pool.

    Attributes:
        number: counts the recordings of the pool.
        spares: the numbers of those whose results were reserved when it was recorded: it does not overwrite them.
        is_reserved: whether later recordings do not overwrite the results.
    """

    def __init__(self, number: int, spares: frozenset[int], memories: Sequence[ResultMemory]) -> None:
        self.number, self.spares, self.is_reserved = number, spares, True
        self._memories = memories

    def is_alive(self) -> bool:
        """Return whether a tensor that an earlier replay returned still shares the memory."""
        return any(memory.is_alive() for memory in self._memories)

    def release(self, without_owner: WithoutOwner) -> None:
        """Let later recordings overwrite the results, of which none is alive."""
        for memory in self._memories:
            memory.release(without_owner)
        self.is_reserved = False


class SharedPool:
    """The shares of a pool. Its user holds the recorder's lock."""

    def __init__(self) -> None:
        self._count = 0
        self._shares: weakref.WeakSet[PoolShare] = weakref.WeakSet()
        self._replayed: dict[int, PoolShare] = {}  # since they were last seen not to be alive

    def reserve(self, without_owner: WithoutOwner) -> frozenset[int] | None:
        """Release what is not alive, before a recording is made.

        Args:
            without_owner: see `Recorder`.

        Returns:
            The numbers of the shares that it spares; None if it must not share the pool: a result is alive that it
            might overwrite.
        """
        if any(not share.is_reserved and share.is_alive() for share in self._replayed.values()):
            return None
        reserved = [share for share in self._shares if share.is_reserved]
        for share in reserved:
            if not share.is_alive():
                share.release(without_owner)
        return frozenset(share.number for share in reserved if share.is_reserved)

    def add(self, spares: frozenset[int], memories: Sequence[ResultMemory]) -> PoolShare:
        """Return the share of a new recording; `spares` is what `reserve` returned before it was made."""
        self._count += 1
        share = PoolShare(self._count, spares, memories)
        self._shares.add(share)
        return share

    def may_replay(self, share: PoolShare) -> bool:
        """Return whether a replay overwrites no result of another recording that is alive."""
        for number, other in list(self._replayed.items()):
            if number == share.number or number in share.spares:
                continue
            if other.is_alive():
                return False
            del self._replayed[number]
        return True

    def replays(self, share: PoolShare) -> None:
        """Note that the results of a recording are about to be computed."""
        self._replayed[share.number] = share
