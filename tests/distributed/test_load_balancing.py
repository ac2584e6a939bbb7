"""Each sample once, samples of similar cost at the same time, as many samples and batches on every rank."""

from __future__ import annotations

import itertools

import pytest

from onnxtrain.distributed.load_balancing import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

COSTS = [(37 * i) % 101 for i in range(101)]


def samplers(world: int, costs: list[int] = COSTS, **arguments: object) -> list[LoadBalancingDistributedSampler]:
    result = [LoadBalancingDistributedSampler(costs, lambda c: c, world, rank, **arguments) for rank in range(world)]
    for sampler in result:
        sampler.set_epoch(3)
    return result


@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("count", [0, 1, 6, 100, 101])
def test_every_sample_once_and_as_many_on_every_rank(world: int, shuffle: bool, drop_last: bool, count: int) -> None:
    by_rank = samplers(world, COSTS[:count], shuffle=shuffle, drop_last=drop_last)
    lists = [list(sampler) for sampler in by_rank]
    assert {len(one) for one in lists} == {len(by_rank[0])}
    indices = list(itertools.chain(*lists))
    if drop_last:
        assert len(indices) == len(set(indices)) == count - count % world
    else:
        assert set(indices) == set(range(count))
        assert len(indices) == -(-count // world) * world


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_ranks_get_at_the_same_time_is_of_like_cost(shuffle: bool) -> None:
    for turn in zip(*samplers(4, shuffle=shuffle), strict=True):
        costs = [COSTS[i] for i in turn]
        assert max(costs) - min(costs) <= 6  # costs are 0 to 100, each once; the last turn is filled up


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    (sampler,) = samplers(1)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(4)
    assert first != list(sampler)
    assert first != list(samplers(1, seed=1)[0])
    plain = samplers(1, shuffle=False)[0]
    assert [COSTS[i] for i in plain] == sorted(COSTS)


def test_groups_are_sorted_each_by_itself() -> None:
    order = list(samplers(1, COSTS[:100], shuffle=False, group_size=10)[0])
    for start in range(0, 100, 10):
        group = order[start : start + 10]
        assert sorted(group) == list(range(start, start + 10))
        assert [COSTS[i] for i in group] == sorted(COSTS[i] for i in group)


def test_randomness_disturbs_the_order_by_its_level() -> None:
    def spread(level: float) -> int:
        return max(max(COSTS[i] for i in turn) - min(COSTS[i] for i in turn) for turn in zip(
            *samplers(4, COSTS[:100], random_level=level), strict=True
        ))  # fmt: skip

    assert spread(0) <= 5 < spread(0.2) <= 30 < spread(1)


def test_defaults_are_the_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    sampler = LoadBalancingDistributedSampler(COSTS, lambda c: c)
    assert (sampler.rank, sampler.world_size) == (1, 3)


@pytest.mark.parametrize(
    "wrong", [{"rank": 2}, {"rank": -1}, {"random_level": 1.5}, {"random_level": -0.1}, {"group_size": 0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        LoadBalancingDistributedSampler(COSTS, lambda c: c, **{"world_size": 2, "rank": 0, **wrong})


def of_tokens(indices: list[int]) -> list[list[int]]:
    batches: list[list[int]] = [[]]
    for i in indices:
        if sum(COSTS[j] for j in batches[-1]) + COSTS[i] > 120:
            batches.append([])
        batches[-1].append(i)
    return batches


@pytest.mark.parametrize("drop_last", [True, False])
def test_as_many_batches_on_every_rank(drop_last: bool) -> None:
    batch_samplers = [LoadBalancingDistributedBatchSampler(s, of_tokens, drop_last) for s in samplers(3)]
    alone = [len(of_tokens(list(s.sampler))) for s in batch_samplers]
    assert len(set(alone)) > 1  # the ranks would differ
    expected = min(alone) if drop_last else max(alone)
    for sampler, own in zip(batch_samplers, alone, strict=True):
        batches = list(sampler)
        assert len(sampler) == len(batches) == expected
        assert batches[: min(own, expected)] == of_tokens(list(sampler.sampler))[:expected]
        first = batches
        sampler.set_epoch(9)
        assert list(sampler) != first


def test_a_sampler_that_drops_is_refused() -> None:
    with pytest.raises(ValueError, match="drop_last"):
        LoadBalancingDistributedBatchSampler(samplers(2, drop_last=True)[0], of_tokens)


def test_no_samples_no_batches() -> None:
    assert list(LoadBalancingDistributedBatchSampler(samplers(2, [])[0], lambda indices: [])) == []
