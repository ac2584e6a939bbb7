"""The one door to PyTorch's private parts: nothing outside this package imports, reads or replaces one.

Each is an entry (`internal.Internal`) with the reason why it is used, a check of its behaviour at first use, and what
takes its place where PyTorch has it no more: something slower, or a refusal that lets the module run in PyTorch. It is
never an ImportError, and never a wrong number.

    aten_kernels        ATen's kernels that have no public name
    autograd            a backward that is running, the contexts of custom functions
    dispatch            the state of the dispatcher: modes, autocast, the profiler
    dynamo              torch.compile's tracer
    inductor            the compiler of fused regions
    operators           the operators of torch.ops and their schemas
    optimizer_kernels   kernels over lists of tensors
    pytree              nested containers
    tensors             storages, views, fake tensors
    torchscript         the exporter of TorchScript graphs
"""
