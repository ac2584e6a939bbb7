"""Run a program that Inductor generated for a GPU on tensors of the CPU, its kernels in Triton's interpreter.

TRITON_INTERPRET=1 must be set before Triton is imported. Each Triton kernel of the program then runs as it was
generated, block by block, in numpy. GEMMs run PyTorch's kernels for the CPU, and so does attention, which is one
operator of the program. Functions of NVIDIA's libdevice return None in the interpreter: PyTorch's functions of the same
names replace them.

Not shown by this: rounding of the GPU's own instructions, and races between the threads of a block.
"""

from __future__ import annotations

import importlib
import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from onnxtrain.execute.inductor_program.call import ArtifactCall
from onnxtrain.execute.inductor_program.request import ArgumentSpec, Layout
from onnxtrain.execute.inductor_program.split import split
from onnxtrain.execute.inductor_program.stored import StoredProgram
from onnxtrain.execute.program import Program
from onnxtrain.ops.attention import flash
from onnxtrain.plan.cut import Part
from tests.gpu_without_one.inductor_code import Code, load_kernel, triton_driver

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "log": torch.log,
    "mul_rn": operator.mul,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}
_ON_CPU = {
    r"guards\._empty_strided_cuda": "guards._empty_strided_cpu",
    r"from torch\._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = int",
    r"torch\.ops\.onnxtrain\.attention(_backward)?\.default\(": r"onnxtrain_attention\1(",
}


def interpreted(part: Part, code: Code, tensors: Sequence[torch.Tensor], sizes: Sequence[int], folder: Path) -> Any:
    """Return the call of a generated program, as `kernels="inductor"` makes it of an artifact.

    Args:
        part: what the program computes.
        code: the program.
        tensors: its arguments in the call that it was generated for; only their metadata is read.
        sizes: its sizes in that call.
        folder: for the sources of its kernels.
    """
    parts = split(part)
    layout = Layout(parts.computed, [ArgumentSpec.from_tensor(tensor) for tensor in tensors], sizes)
    stored = StoredProgram(b"", None, list(code.constants))
    views = Program(parts.views, "views", torch.device("cpu"))
    return ArtifactCall(parts, layout, _function(code, folder), stored, views.run)


def _function(code: Code, folder: Path) -> Callable[[list[Any]], Any]:
    source = code.source
    for pattern, replacement in _ON_CPU.items():
        source = re.sub(pattern, replacement, source)
    namespace: dict[str, Any] = {
        "__name__": "generated",
        "onnxtrain_attention": _attention,
        "onnxtrain_attention_backward": _attention_backward,
    }
    load = lambda self, name, kernel, **options: load_kernel(kernel, folder)
    with patch("torch._inductor.async_compile.AsyncCompile.triton", load):
        exec(compile(source, "generated program", "exec"), namespace)

    def run(arguments: list[Any]) -> Any:
        with _interpreter():
            return namespace["call"](arguments)

    return run


@contextmanager
def _interpreter() -> Iterator[None]:
    """Kernels run in Triton's interpreter, with PyTorch's functions in the place of libdevice's."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "Triton's functions must be imported for the interpreter"
    libdevice = importlib.import_module("triton.language.extra.libdevice")
    with (
        triton_driver(),
        patch.multiple(libdevice, **{name: _on_blocks(function) for name, function in _FUNCTIONS.items()}),
        patch("torch.cuda._DeviceGuard", lambda index: nullcontext()),
        patch("torch.cuda.set_device", lambda index: None),
    ):
        yield


def _on_blocks(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a function of blocks of the interpreter that computes what a function of tensors does."""
    interpreter = importlib.import_module("triton.runtime.interpreter")

    def run(*blocks: Any) -> Any:
        result = function(*(torch.from_numpy(block.handle.data) for block in blocks))
        handle = interpreter.TensorHandle(result.numpy(), blocks[0].dtype)
        return importlib.import_module("triton.language").tensor(handle, blocks[0].type)

    return run


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    ratio: float,
) -> Any:
    """PyTorch's attention on a CPU, with the strides of results on a GPU."""
    assert not ratio
    y, logsumexp = flash.attention(q, k, v, mask, causal, scale)
    return _rows_together(y), logsumexp.contiguous(), torch.empty(2, dtype=torch.int64)


def _attention_backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    y: torch.Tensor,
    logsumexp: torch.Tensor,
    state: torch.Tensor,
    causal: bool,
    scale: float | None,
    ratio: float,
) -> Any:
    assert not ratio
    gradients = flash.attention_backward(dy, q, k, v, mask, y, _rows_together(logsumexp), causal, scale)
    return tuple(map(_rows_together, gradients))


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)
