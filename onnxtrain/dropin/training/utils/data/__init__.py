"""`onnxruntime.training.utils.data`."""

from onnxtrain.distributed.load_balancing import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
