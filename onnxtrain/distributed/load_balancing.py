"""Samplers that give all ranks samples of similar cost at the same time, to keep ranks from waiting for each other.

On each rank:

    sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=lambda sample: len(sample["input_ids"]))
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

from onnxtrain.system import ranks


class LoadBalancingDistributedSampler(Sampler[int]):
    """Sort samples by cost and distribute them over the ranks round-robin.

    Args:
        dataset: a map-style dataset with a length.
        complexity_fn: returns the cost of a sample. Called once per sample, in the constructor.
        world_size: the number of ranks; None: that of the process group.
        rank: of this process; None: that in the process group.
        shuffle: whether each epoch has another order; samples drawn at the same time keep similar costs.
        group_size: how many samples are sorted together; None: all. With `shuffle`, groups differ per epoch.
        seed: of the shuffle; the same on every rank.
        drop_last: drop the samples of an incomplete last round, instead of repeating some.
        random_level: noise added to the costs before sorting, from 0 to 1, as a share of their range.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
    ) -> None:
        self.world_size = ranks.world_size() if world_size is None else world_size
        self.rank = ranks.rank() if rank is None else rank
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}; expected from 0 to below world_size, {self.world_size}.")
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level is {random_level}; expected from 0 to 1.")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size is {group_size}; expected 1 or more.")
        self.dataset = dataset
        self.shuffle = shuffle
        self.group_size = group_size
        self.seed = seed
        self.drop_last = drop_last
        self.random_level = random_level
        self.epoch = 0
        self._costs = torch.tensor([float(complexity_fn(dataset[i])) for i in range(len(dataset))], dtype=torch.float64)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, which determines the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        count = len(self._costs) / self.world_size
        return math.floor(count) if self.drop_last else math.ceil(count)

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_rank(self.rank))

    def of_rank(self, rank: int) -> list[int]:
        """Return the indices of the samples of any rank in this epoch."""
        return [round_[rank] for round_ in self._rounds()]

    def _rounds(self) -> list[list[int]]:
        """Return, for each round, the index of each rank's sample."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        count, size = len(self._costs), self.world_size
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        costs = self._costs
        if self.random_level and count:
            noise = torch.rand(count, generator=generator, dtype=torch.float64)
            costs = costs + noise * self.random_level * (costs.max() - costs.min())
        groups = order.split(self.group_size or max(1, count))
        indices = [i for group in groups for i in group[costs[group].argsort(stable=True)].tolist()]
        rounds = [indices[start : start + size] for start in range(0, count, size)]
        if rounds and len(rounds[-1]) < size:
            if self.drop_last:
                rounds.pop()
            else:  # repeat samples of similar cost
                last = rounds[-1]
                similar = (rounds[-2] if len(rounds) > 1 else last)[::-1]
                rounds[-1] = last + [similar[i % len(similar)] for i in range(size - len(last))]
        if self.shuffle:
            rounds = [rounds[i] for i in torch.randperm(len(rounds), generator=generator).tolist()]
        return rounds


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of varying size, with the same number of batches on each rank.

    Args:
        sampler: provides the indices of each rank's samples.
        batch_fn: groups a rank's indices into batches: for example, up to a number of tokens each.
        drop_last: whether ranks with more batches drop some; otherwise ranks with fewer repeat some.

    Raises:
        ValueError: the sampler drops samples.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Sequence[Sequence[int]]],
        drop_last: bool = False,
    ) -> None:
        if sampler.drop_last:
            raise ValueError(
                "The sampler has drop_last=True; expected False. Pass drop_last to the batch sampler instead."
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._epoch: int | None = None
        self._batches: list[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, which determines the order."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._of_epoch())

    def _of_epoch(self) -> list[list[int]]:
        if self._epoch != self.sampler.epoch:
            batches_of_ranks = [self.batch_fn(self.sampler.of_rank(rank)) for rank in range(self.sampler.world_size)]
            own = [list(batch) for batch in batches_of_ranks[self.sampler.rank]]
            counts = [len(batches) for batches in batches_of_ranks]
            count = min(counts) if self.drop_last else max(counts)
            self._batches = [own[i % len(own)] for i in range(count)] if own else []
            self._epoch = self.sampler.epoch
        return self._batches
