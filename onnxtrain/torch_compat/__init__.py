"""Access PyTorch's private parts: nothing outside this package imports, reads or replaces one.

Each part is an entry (`internal.Internal`) with the reason for using it, a check of its behaviour at first use, and a
fallback for versions of PyTorch that lack it: a slower implementation, or a refusal after which the module runs in
PyTorch. A missing part never leads to an ImportError or a wrong result.

    aten_kernels        ATen's kernels that have no public name
    aten_operators      ATen's operators that have no public name
    autograd            the running backward, the contexts of custom functions
    decompositions      decompositions and Python kernels of composite operators
    dispatch            the state of the dispatcher: modes, autocast, the profiler
    dynamo              torch.compile's tracer
    fake_tensors        fake tensors and their modes
    import_order        imports of PyTorch that take longer the later they come
    inductor            the compiler of fused regions
    modes               modes and global settings of the caller, autocast inside operators
    operators           the operators of torch.ops and their schemas
    optimizer_kernels   kernels over lists of tensors
    patch_points        all attributes of PyTorch that a capture replaces while it runs
    pytree              nested containers
    replacement         replaces an attribute for one thread, and restores it
    symbols             expressions of symbolic sizes
    tensors             storages, views, versions of tensors
    torchscript         the exporter of TorchScript graphs
    tracing             the configuration of torch.export, and work in it whose results are not used
"""
