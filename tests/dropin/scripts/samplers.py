"""Batches of similar length on every rank."""

from onnxruntime.training.utils.data import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from torch.utils.data import DataLoader


class Sentences:
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return self.lengths[index]


def batches_of_tokens(dataset, limit):
    def batch_fn(indices):
        batches, batch, tokens = [], [], 0
        for index in indices:
            if batch and tokens + dataset[index] > limit:
                batches.append(batch)
                batch, tokens = [], 0
            batch.append(index)
            tokens += dataset[index]
        return [*batches, batch] if batch else batches

    return batch_fn


dataset = Sentences([(7 * i) % 31 + 1 for i in range(60)])
for epoch in range(2):
    for rank in range(2):
        sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=lambda n: n, world_size=2, rank=rank)
        batch_sampler = LoadBalancingDistributedBatchSampler(sampler, batch_fn=batches_of_tokens(dataset, 64))
        batch_sampler.set_epoch(epoch)
        loader = DataLoader(dataset, batch_sampler=batch_sampler)
        print("epoch", epoch, "rank", rank, "batches", len(loader), "most", max(int(sum(batch)) for batch in loader))
