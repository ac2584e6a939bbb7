"""C++ compiled on the user's machine while training goes on: source text in, functions out.

    KERNELS = Library("mlp", source, {"forward": "pppi"})     # nothing happens yet
    KERNELS.request()                                         # compiles behind, at low priority; returns at once

    native = KERNELS.functions                                # None until it is there, or for good
    if native is None:
        ...                                                   # the ATen form
    else:
        native.forward(*pointers(x, w, y), x.size(0))

`source` defines its functions as `extern "C"`. Before it stands `parallel.h`: `parallel_for(threads, count, f)` runs
f(begin, end) on the threads that PyTorch itself uses. A signature has a letter for each argument: p pointer, i
int64_t, f float, d double, o Python object; functions return nothing, or an object (">o" at the end). The caller
answers for sizes, strides and types: nothing is checked on the way, and a call with four arguments costs 0.6 us. With
`torch_headers` the source may include those of PyTorch and Python.

    library.py    Library: asks for its code once, and gives its functions out
    build.py      the cache on disk
    background.py the child processes: at low priority, one after the other; pieces of Python beside a training
    compiler.py   which compiler, which flags

Libraries are kept under `cache_folder("native")`, by source, flags, compiler and processor. Where there is no compiler
or the source does not compile, that is logged once and `functions` stays None. The option `native` (ONNXTRAIN_NATIVE=0)
switches them off: ask it before `request`. Linux only: elsewhere PyTorch's threads cannot be reached from C++ without
PyTorch's headers.
"""

from onnxtrain.native.library import Library as Library
from onnxtrain.native.library import pointers as pointers
from onnxtrain.native.library import text as text
