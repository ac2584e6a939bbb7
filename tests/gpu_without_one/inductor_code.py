"""The code that Inductor generates for programs on a GPU that is not there: Python, and Triton kernels."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.device_interface import CudaInterface

from onnxtrain.execute import program as programs
from onnxtrain.execute.inductor_program.request import ArgumentSpec, ProgramRequest
from onnxtrain.execute.inductor_program.split import split
from onnxtrain.execute.regions import child
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import program_compiler
from tests.gpu_without_one.fake_gpu import H100, FakeConstant, fake_gpu, fake_mode
from tests.gpu_without_one.launches import Launches, captured

real_constant = programs.constant_tensor  # before `fake_gpu` replaces it
GPU = torch.device("cuda", 0)
CAPABILITIES = (80, 90, 100)  # sm_80, sm_90a and sm_100a


@dataclass(frozen=True)
class Code:
    """A generated program.

    Attributes:
        source: Python, with the sources of Triton kernels.
        constants: the tensors that it takes after its arguments, on the CPU.
    """

    source: str
    constants: Sequence[torch.Tensor] = ()

    @property
    def launches(self) -> int:
        """How many kernels a call launches: Triton's, GEMMs, and those of other operators of PyTorch."""
        return len(re.findall(r"\.run\(|extern_kernels\.\w+\(|= torch\.ops\.\w+\.\w+\.\w+\(", self.call))

    @property
    def call(self) -> str:
        """The function that runs the program."""
        return self.source.split("def call(", 1)[1]

    @property
    def kernels(self) -> list[str]:
        """The sources of the Triton kernels."""
        return re.findall(r"async_compile\.triton\('\w+', '''(.*?)'''", self.source, re.DOTALL)


def cubin(kernel: str, capability: int, folder: Path) -> bytes:
    """Compile a Triton kernel, in its first configuration, to the code of a GPU of a compute capability (80: 8.0)."""
    triton = importlib.import_module("triton")
    kernel_for = re.sub(r"\bcc=\d+, major=\d+", f"cc={capability}, major={capability // 10}", kernel)
    compiled: list[Any] = []
    compile_kernel = triton.compile

    def record(*arguments: Any, **options: Any) -> Any:
        compiled.append(compile_kernel(*arguments, **options))
        return compiled[-1]

    tuner = load_kernel(kernel_for, folder)
    with triton_driver(), patch.object(triton, "compile", record):
        tuner._precompile_config(tuner.configs[0])
    code: bytes = compiled[0].asm["cubin"]
    return code


def load_kernel(kernel: str, folder: Path) -> Any:
    """Import the source of a Triton kernel; returns the object that Inductor's programs run."""
    heuristics = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    path = folder / f"kernel_{hashlib.sha256(kernel.encode()).hexdigest()[:12]}.py"
    path.write_text(kernel, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton_driver():
        spec.loader.exec_module(module)
    (tuner,) = (v for v in vars(module).values() if isinstance(v, heuristics.CachingAutotuner))
    return tuner


@contextmanager
def triton_driver() -> Iterator[None]:
    """Triton finds a driver."""
    driver = importlib.import_module("triton.runtime.driver").driver
    with (
        patch.object(driver, "_active", _Driver()),
        patch("torch._inductor.runtime.triton_helpers.set_driver_to_gpu"),
    ):
        yield


class _Driver:
    """What Triton asks of a driver while code is generated."""

    def get_current_target(self) -> Any:
        return importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)


class _Generated(BaseException):
    """The code is generated; without a GPU, it cannot be loaded."""


def inductor_step(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Mapping[str, Any]],
    folder: Path,
    **options: Any,
) -> tuple[Code, Code]:
    """Return what Inductor generates for forward and backward of a module on fake CUDA tensors."""
    mode = fake_mode()
    capture = captured(make_module, make_inputs, mode, **options)
    with fake_gpu(mode):
        _, backward = capture.run(Launches(), Launches())
        forward = generate(capture.unit.forward.part, capture.tensors, (), folder / "forward")
        return forward, generate(backward.program.part, backward.arguments, backward.sizes, folder / "backward")


def generate(part: Part, tensors: Sequence[torch.Tensor], sizes_in: Sequence[int], folder: Path) -> Code:
    """Return the code of a part; inside `fake_gpu`."""
    folder.mkdir()
    specs = [ArgumentSpec.from_tensor(tensor) for tensor in tensors]
    ProgramRequest(split(part).computed, specs, sizes_in, GPU).write(folder)
    sources: list[str] = []

    def stop(source: str) -> None:
        sources.append(source)
        raise _Generated

    def compile_to_code(*arguments: Any, **options: Any) -> Any:
        with patch.object(inductor.lowering, "save_output_code", stop):
            return inductor.compile(*arguments, **options)

    modes: list[Any] = []
    make_sizes = program_compiler.symbolic_sizes

    def symbolic_sizes(hints: Mapping[str, int]) -> Any:
        mode, symbols = make_sizes(hints)
        modes.append(mode)
        return mode, symbols

    real: dict[int, torch.Tensor] = {}
    traces: list[Any] = []
    trace = program_compiler.trace

    def record_trace(*arguments: Any) -> Any:
        traces.append(trace(*arguments))
        return traces[-1]

    make_constant = lambda value: FakeConstant(real_constant(value), modes[-1], real)
    inductor = program_compiler.INDUCTOR.get()
    with (
        triton_driver(),
        patch.object(program_compiler, "symbolic_sizes", symbolic_sizes),
        patch.object(programs, "constant_tensor", make_constant),
        patch.object(program_compiler, "trace", record_trace),
        patch("torch.cuda._exchange_device", lambda index: 0),
        patch("torch.cuda._maybe_exchange_device", lambda index: 0),
        patch.multiple(
            CudaInterface,
            get_device_properties=staticmethod(lambda device=None: H100),
            current_device=staticmethod(lambda: 0),
        ),
        patch.object(program_compiler.INDUCTOR, "get", return_value=inductor._replace(compile=compile_to_code)),
        patch("torch._inductor.codegen.wrapper.PythonWrapperCodegen.generate_and_run_autotune_block"),
        # Folding runs operators, and other processes would compile kernels at once.
        inductor.config.patch(joint_graph_constant_folding=False, compile_threads=1),
    ):
        try:
            child.compile_in(folder)
        except _Generated:
            return Code(sources[0], [real[id(constant)] for constant in traces[0].constants])
    raise AssertionError("Inductor generated no code")
