"""The one door to PyTorch's private parts: nothing outside this package imports, reads or replaces one.

Each is an entry (`internal.Internal`) with the reason why it is used, a check of its behaviour at first use, and what
takes its place where PyTorch has it no more: something slower, or a refusal that lets the module run in PyTorch. It is
never an ImportError, and never a wrong number.

    aten_kernels        ATen's kernels that have no public name
    aten_operators      ATen's operators that have no public name
    autograd            a backward that is running, the contexts of custom functions
    decompositions      decompositions and Python kernels of composite operators
    dispatch            the state of the dispatcher: modes, autocast, the profiler
    dynamo              torch.compile's tracer
    fake_tensors        fake tensors and their modes
    inductor            the compiler of fused regions
    modes               modes and switches of the caller, autocast inside operators
    operators           the operators of torch.ops and their schemas
    optimizer_kernels   kernels over lists of tensors
    patch_points        all attributes of PyTorch that a capture replaces while it runs
    pytree              nested containers
    replacement         replaces an attribute for one thread, and puts it back
    symbols             expressions of symbolic sizes
    tensors             storages, views, versions of tensors
    torchscript         the exporter of TorchScript graphs
    tracing             the configuration of torch.export, and work in it that nobody reads
"""
