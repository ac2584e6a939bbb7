"""What a training step would launch on a GPU: the kernels of its programs, run on fake CUDA tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain import ORTModule
from onnxtrain.execute.boundary import Unit
from tests.gpu_without_one.fake_gpu import cuda_autocast, fake_gpu, fake_mode

# Operators that make a tensor without a kernel: views have none by their schema, these neither.
_NO_KERNEL = frozenset(
    {
        "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias",
        "reshape", "detach", "lift_fresh", "set_", "resize_", "sym_size", "sym_numel", "is_same_size", "device",
    }
)  # fmt: skip
_WAITS = frozenset({"_local_scalar_dense", "nonzero", "item", "masked_select", "_unique2"})


@dataclass(frozen=True)
class Launch:
    """A kernel: its operator, the dtypes, shapes and bytes of what it reads and writes, and their devices."""

    operator: str
    reads: tuple[torch.dtype, ...]
    writes: tuple[torch.dtype, ...]
    read_shapes: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]  # of what it writes
    bytes: int
    devices: frozenset[str]


@dataclass
class Launches:
    """Those of a program."""

    kernels: list[Launch] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.kernels)

    def counts(self) -> Counter[str]:
        """Launches by operator."""
        return Counter(k.operator for k in self.kernels)

    def waits(self) -> list[Launch]:
        """Return the launches for whose result the host waits."""
        return [k for k in self.kernels if k.operator in _WAITS]

    def on_several_devices(self) -> list[Launch]:
        """Return the launches that read or write tensors of two devices."""
        return [k for k in self.kernels if len(k.devices) > 1]


class _Recorder(TorchDispatchMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in _NO_KERNEL and not func.is_view:
            reads, writes = _tensors((args, kwargs)), _tensors(results)
            self._launches.kernels.append(
                Launch(
                    name,
                    tuple(t.dtype for t in reads),
                    tuple(t.dtype for t in writes),
                    tuple(tuple(t.shape) for t in reads),
                    tuple(tuple(t.shape) for t in writes),
                    bytes_of([*reads, *writes]),
                    frozenset(str(t.device) for t in [*reads, *writes] if t.dim() or t.device.type != "cpu"),
                )
            )
        return results


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class PendingRows:
    """In the place of `PendingInt`, on fake tensors: 600 rows have labels."""

    def __init__(self, number: torch.Tensor) -> None:
        assert number.numel() == 1

    def result(self) -> int:
        return 600


def bytes_of(tensors: Iterable[Any]) -> int:
    """The bytes of the storages of tensors, each storage once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if isinstance(t, torch.Tensor)
    }
    return int(sum(storages.values()))


@dataclass(frozen=True)
class Step:
    """A training step on a GPU.

    Attributes:
        forward: launches of the forward program.
        backward: launches of the backward program.
        kept: bytes kept between them, without parameters and inputs.
        sources: the programs.
    """

    forward: Launches
    backward: Launches
    kept: int
    sources: tuple[str, str]


class _Compiled(BaseException):
    """The unit is made, and what it would run on."""

    def __init__(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.unit, self.tensors = unit, tensors


def _stop(unit: Unit, tensors: Sequence[torch.Tensor]) -> Any:
    raise _Compiled(unit, tensors)


@dataclass(frozen=True)
class Capture:
    """A unit, and the fake CUDA tensors of a call of it.

    Attributes:
        unit: the programs.
        tensors: the arguments of forward.
        mode: of the tensors.
        real: the tensors on the CPU that some fake ones stand for, by the fakes' ids: parameters, buffers and inputs.
    """

    unit: Unit
    tensors: list[torch.Tensor]
    mode: FakeTensorMode
    real: Mapping[int, torch.Tensor]

    @property
    def cotangents(self) -> tuple[bool, ...]:
        """Which results have one: the first."""
        return tuple(i == 0 for i in range(self.unit.num_results))

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which arguments of autograd's function need a gradient: the unit, then the tensors."""
        return (False, *(isinstance(t, torch.Tensor) and t.requires_grad for t in self.tensors))

    def run(self, forward: Launches, backward: Launches) -> tuple[list[Any], BackwardCall]:
        """Run both programs, and record what they launch; returns the results of forward, and the call of backward."""
        unit = self.unit
        with self.mode, torch.no_grad():
            with _Recorder(forward):
                results, sizes = unit.forward.run(self.tensors, ())
            program = unit.backward(self.cotangents, self.needed)
            saved = results[unit.first_kept :]
            cotangents = [torch.ones_like(results[0]), *[None] * (unit.num_results - 1)]
            arguments = [*(saved[i] for i in program.kept), *(cotangents[i] for i in program.cotangents)]
            call = BackwardCall(program.program, arguments, [sizes[i] for i in program.sizes])
            with _Recorder(backward):
                call.program.run(list(arguments), call.sizes)
        return list(results), call


@dataclass(frozen=True)
class BackwardCall:
    """A backward program, and the arguments of a call of it."""

    program: Any
    arguments: list[Any]
    sizes: list[int]


def captured(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Mapping[str, Any]],
    mode: FakeTensorMode,
    *,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Capture:
    """Capture a module on fake CUDA tensors; nothing falls back. See `onnxtrain_step`."""
    real: dict[int, torch.Tensor] = {}
    module = _on_gpu(make_module().train(), mode, real)
    inputs = _fakes(make_inputs(), mode, real)
    wrapped = ORTModule(module, fallback_policy="FALLBACK_DISABLE", **options)
    with fake_gpu(mode), patch.object(Unit, "run", _stop):
        try:
            with cuda_autocast(autocast):
                wrapped(**inputs)
        except _Compiled as compiled:
            return Capture(compiled.unit, list(compiled.tensors), mode, real)
    raise AssertionError("the module ran no unit")


def onnxtrain_step(
    make_module: Callable[[], torch.nn.Module],
    make_inputs: Callable[[], Mapping[str, Any]],
    *,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Step:
    """Capture a module on fake CUDA tensors, and run its programs; nothing falls back.

    Args:
        make_module: makes the module.
        make_inputs: makes the keyword arguments of a call; its first result is the loss.
        autocast: the dtype of CUDA autocast; None without.
        options: of ORTModule.
    """
    mode = fake_mode()
    capture = captured(make_module, make_inputs, mode, autocast=autocast, **options)
    with fake_gpu(mode):
        forward, backward = Launches(), Launches()
        results, call = capture.run(forward, backward)
    own = {t.untyped_storage()._cdata for t in capture.tensors if isinstance(t, torch.Tensor)}
    saved = results[capture.unit.first_kept :]
    kept = [t for t in saved if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in own]
    return Step(forward, backward, bytes_of(kept), (capture.unit.forward.source, getattr(call.program, "source", "")))


def _on_gpu(module: torch.nn.Module, mode: FakeTensorMode, real: dict[int, torch.Tensor]) -> torch.nn.Module:
    """The module with fake CUDA tensors; shared parameters stay shared. Adds what they stand for to `real`."""
    fakes: dict[int, torch.Tensor] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            fake = fakes.setdefault(id(parameter), torch.nn.Parameter(_fake(parameter.detach(), mode)))
            part.register_parameter(name, fake)
            real[id(fake)] = parameter.detach()
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = _fake(buffer, mode)
            real[id(part._buffers[name])] = buffer
    return module


def eager_bytes_kept(make_module: Callable[[], torch.nn.Module], make_inputs: Callable[[], Mapping[str, Any]]) -> int:
    """The bytes that eager PyTorch keeps between forward and backward, without parameters and inputs.

    Attention is flash attention. A mask must be the causal one: transformers makes it a tensor if tensors are fake.
    """
    mode = fake_mode()
    module, inputs = _on_gpu(make_module().train(), mode, {}), _fakes(make_inputs(), mode, {})
    kept: list[torch.Tensor] = []
    with (
        fake_gpu(mode),
        mode,
        patch.object(torch.nn.functional, "scaled_dot_product_attention", _flash_attention),
        patch("transformers.integrations.sdpa_attention.use_gqa_in_sdpa", lambda *arguments: True),  # without a mask
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
        ),
    ):
        results = module(**inputs)
    given = [*module.parameters(), *module.buffers(), *inputs.values()]
    own = {t.untyped_storage()._cdata for t in given if isinstance(t, torch.Tensor)}
    assert results is not None
    return bytes_of(t for t in kept if t.untyped_storage()._cdata not in own)


def _flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    is_causal = is_causal or attn_mask is not None
    y: torch.Tensor
    y, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)
    return y


def _fakes(inputs: Mapping[str, Any], mode: FakeTensorMode, real: dict[int, torch.Tensor]) -> dict[str, Any]:
    fakes = {name: _fake(v, mode) if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    real.update({id(fakes[name]): v for name, v in inputs.items() if isinstance(v, torch.Tensor)})
    return fakes


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
