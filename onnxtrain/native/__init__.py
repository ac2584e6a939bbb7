"""C++ kernels compiled on the user's machine in the background: source text in, functions out.

    KERNELS = Library("mlp", source, {"forward": "pppi"})     # does not compile yet
    KERNELS.request()                                         # compiles in the background; returns immediately

    native = KERNELS.functions                                # None until it is compiled, or forever
    if native is None:
        ...                                                   # PyTorch's operators
    else:
        native.forward(*pointers(x, w, y), x.size(0))

`source` defines its functions as `extern "C"`. `parallel.h` is prepended: `parallel_for(threads, count, f)` runs
f(begin, end) on the threads of PyTorch's own pool. A signature has one letter per argument: p pointer, i int64_t, f
float, d double, o Python object; functions return nothing, or an object (">o" at the end). The caller guarantees
shapes, strides and dtypes: nothing is checked, and a call with four arguments takes 0.6 us. With `torch_headers` the
source may include the headers of PyTorch and Python.

    library.py    Library: requests the compilation once and provides the functions
    build.py      the cache on disk
    background.py child processes at low priority, one at a time; throttled Python work beside a training
    compiler.py   the compiler and its flags
    row_kernel.py cross entropy for a GPU, in Triton, which compiles it when it is called

Libraries are cached in `cache_folder("native")`, by source, flags, compiler and processor. If there is no compiler or
the source does not compile, that is logged once and `functions` stays None. `kernels="pytorch"` disables them:
check the option before `request`. Linux only: elsewhere C++ cannot reach PyTorch's threads without PyTorch's
headers.
"""

from onnxtrain.native.library import Library as Library
from onnxtrain.native.library import pointers as pointers
from onnxtrain.native.library import read_sources as read_sources
