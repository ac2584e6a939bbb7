"""Which of several kernels runs a node: first by a cost model, then by what each was measured to take."""
