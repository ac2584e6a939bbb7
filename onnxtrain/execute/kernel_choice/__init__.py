"""Choose among the kernels of a node: first by a cost model, then by the measured time of each."""
