"""Programs that may be recorded copy no element between GPU and host: GPU kernels run on meta tensors."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tests.ops
from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.execute.program import Program
from onnxtrain.execute.recorded_program import Recordings
from onnxtrain.ops import OPS, Effects
from onnxtrain.ops.constructors import never
from onnxtrain.ops.definition import Kernel
from onnxtrain.plan.cut import Part, cut, single_part
from tests.execute.cpu_recorder import CpuRecorder, Recorders
from tests.op_case import CaseCheck, OpCase

META = torch.device("meta")
RECORDINGS = Recordings(CpuRecorder(Recorders()), torch.device("cuda"), frozenset())
FAMILIES = {path.stem for path in pathlib.Path(next(iter(tests.ops.__path__))).glob("cases_*.py")}
FAST = {"cases_attention", "cases_index", "cases_loss", "cases_norm", "cases_randomness"}


class Copies(TorchDispatchMode):
    """Refuses copies between devices. Reading an element of a meta tensor raises by itself."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        moves = len({t.device for t in tensors}) > 1
        assert not (moves and func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)), func
        return result


class Numbers(TorchFunctionMode):
    """Refuses tensors made of Python scalars on a device: no operator of theirs is dispatched."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func not in (torch.tensor, torch.as_tensor) or result.device.type == "cpu", func
        return result


def run(part: Part, tensors: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> Any:
    """The tensors and sizes that a GPU program returns; None if it would not be recorded."""
    if RECORDINGS.refusal(part) is not None:
        return None
    program = Program(part, "without elements", META, lambda node, _: expected_kernel(node, "cuda"))
    arguments = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META) for t in tensors]
    program.run(list(arguments), sizes)  # warm-up: kernels have cached their constants now
    with Copies(), Numbers():
        return program.run(arguments, sizes)


def run_case(case: OpCase, dtype: torch.dtype) -> None:
    check, symbol_values = CaseCheck(case, dtype), next(iter(case.size_sets()))
    tensors = check.tensors(symbol_values)
    outputs = run(single_part(check.model), tensors)
    if outputs is None or not check.differentiable:
        return
    cotangents = [None if t is None or not (t.is_floating_point() or t.is_complex()) else t for t in outputs[0]]
    joint = check._joint(tuple(c is not None for c in cotangents))
    parts = cut(joint)
    results, sizes = run(parts.forward, tensors)
    passed = [c for c, v in zip(cotangents, joint.cotangents, strict=True) if v is not None]
    run(parts.backward, [*results[check.count :], *passed], sizes)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(FAMILIES)]
)
def test_recordable_gpu_kernels_copy_nothing_to_or_from_the_host(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    for case in importlib.import_module(f"tests.ops.{family}").CASES:
        run_case(case, torch.float32)


def test_the_documentation_lists_the_operators_that_may_wait() -> None:
    default = next(field.default for field in dataclasses.fields(Kernel) if field.name == "synchronizes")
    waiting = {
        name
        for (_, name), definition in OPS.items()
        if Effects.HOST_SYNC in definition.effects
        or any(kernel.synchronizes not in (default, never) for kernel in definition.kernels)
    }
    page = (pathlib.Path(__file__).parents[2] / "docs/explanation/gpu.md").read_text()
    _, _, table = page.partition("| operators | wait |\n|---|---|\n")
    rows = [line.split("|") for line in table.partition("\n\n")[0].splitlines()]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row[1])) == sorted(waiting)
