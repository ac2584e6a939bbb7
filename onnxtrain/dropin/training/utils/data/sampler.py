"""`onnxruntime.training.utils.data.sampler`."""

from onnxtrain.distributed.load_balancing import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
