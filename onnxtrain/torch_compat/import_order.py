"""Import early what a capture imports in any case, where its time grows with what was imported before it.

The functional collectives of torch.distributed register an operator, for which `inspect` finds the file of every module
that was imported since it last did so: 20 ms directly after PyTorch, 160 ms after sympy, onnx_ir and onnxtrain.
"""

import contextlib
import importlib

with contextlib.suppress(Exception):  # builds of PyTorch without torch.distributed
    importlib.import_module("torch.distributed._functional_collectives")
