"""Samplers that give the ranks samples of like cost at the same time, so that none waits long for another.

Each rank makes one:

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

from onnxtrain.observe import logs


class LoadBalancingDistributedSampler(Sampler[int]):
    """Sorts samples by their cost and deals them out to the ranks in turn.

    Args:
        dataset: has a length, and samples by their number.
        complexity_fn: the cost of a sample, as a number. It is asked once a sample, when the sampler is made.
        world_size: the number of ranks; of the process group where None.
        rank: this one's; of the process group where None.
        shuffle: draws another order in each epoch; what the ranks get at the same time stays of like cost.
        group_size: samples that are sorted with each other; all where None. With `shuffle` each epoch has other groups.
        seed: of the order; the same on every rank.
        drop_last: leaves out the samples that do not go round, instead of giving some twice.
        random_level: from 0 to 1: how far the order by cost is disturbed, as a share of the range of costs.

    Raises:
        ValueError: a number that is out of its range.
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
        self.world_size = logs.world_size() if world_size is None else world_size
        self.rank = logs.rank() if rank is None else rank
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
        """Says which epoch is next: each has its own order."""
        self.epoch = epoch

    def __len__(self) -> int:
        count = len(self._costs) / self.world_size
        return math.floor(count) if self.drop_last else math.ceil(count)

    def __iter__(self) -> Iterator[int]:
        return iter(self.of_rank(self.rank))

    def of_rank(self, rank: int) -> list[int]:
        """The samples of any rank in this epoch."""
        return [turn[rank] for turn in self._turns()]

    def _turns(self) -> list[list[int]]:
        """What the ranks get at the same time."""
        draw = torch.Generator().manual_seed(self.seed + self.epoch)
        count, size = len(self._costs), self.world_size
        order = torch.randperm(count, generator=draw) if self.shuffle else torch.arange(count)
        costs = self._costs
        if self.random_level and count:
            noise = torch.rand(count, generator=draw, dtype=torch.float64)
            costs = costs + noise * self.random_level * (costs.max() - costs.min())
        groups = order.split(self.group_size or max(1, count))
        indices = [i for group in groups for i in group[costs[group].argsort(stable=True)].tolist()]
        turns = [indices[start : start + size] for start in range(0, count, size)]
        if turns and len(turns[-1]) < size:
            if self.drop_last:
                turns.pop()
            else:  # the neighbours by cost a second time
                last = turns[-1]
                near = (turns[-2] if len(turns) > 1 else last)[::-1]
                turns[-1] = last + [near[i % len(near)] for i in range(size - len(last))]
        if self.shuffle:
            turns = [turns[i] for i in torch.randperm(len(turns), generator=draw).tolist()]
        return turns


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Batches of varying size, as many for each rank.

    Args:
        sampler: gives the samples.
        batch_fn: makes a list of batches of the numbers of a rank's samples: say, as many as fit a count of tokens.
        drop_last: ranks with more batches leave some out; otherwise ranks with fewer give some twice.

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
                "The sampler has drop_last=True: give drop_last to the batch sampler, which drops batches."
            )
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._epoch: int | None = None
        self._batches: list[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch is next: each has its own order."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._of_epoch())

    def _of_epoch(self) -> list[list[int]]:
        if self._epoch != self.sampler.epoch:
            made = [self.batch_fn(self.sampler.of_rank(rank)) for rank in range(self.sampler.world_size)]
            own = [list(batch) for batch in made[self.sampler.rank]]
            counts = [len(batches) for batches in made]
            count = min(counts) if self.drop_last else max(counts)
            self._batches = [own[i % len(own)] for i in range(count)] if own else []
            self._epoch = self.sampler.epoch
        return self._batches
