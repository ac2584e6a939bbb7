"""A region as one call: by its kernel where that is there and takes these tensors, else by its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import cast

import torch

from onnxtrain.execute.program import Program
from onnxtrain.execute.regions.request import LEAST_SIZE
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.native.build import BuildError
from onnxtrain.ops.constructors import TORCH_DTYPES
from onnxtrain.plan.cut import Part
from onnxtrain.tolerance import compared

Kernel = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_TRIALS = 10  # timed calls of each way
_CHECKED_SIZE = 3  # of open sizes, in the check of a new kernel: odd, so that loops have a rest


def load(path: Path) -> Kernel:
    """The function of a library that `build` gave: contiguous tensors -> tensors of its own.

    Raises:
        BuildError: this PyTorch cannot load it.
    """
    try:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    except (RuntimeError, AttributeError) as error:
        raise BuildError(f"the library ended with an error when it was loaded: {error}") from error
    return cast(Kernel, runner.run)  # it takes any sequence


class RegionCall:
    """Takes the region's inputs and gives its outputs, new tensors.

    Attributes:
        part: the region.
        kernel: its compiled form.
        chosen: by which way calls go; None while the two take turns and are timed.
    """

    def __init__(self, part: Part, kernel: Kernel, *, timed: bool) -> None:
        """Checks the kernel against the nodes.

        Args:
            part: the region.
            kernel: its compiled form.
            timed: whether the kernel stays only where it is the faster way.

        Raises:
            BuildError: the kernel does not compute what the nodes do, or gives an input out again.
        """
        self.part, self.kernel = part, kernel
        self._nodes = Program(part, "region", torch.device("cpu")).run
        self.chosen: str | None = None if timed else "kernel"
        self._seconds: dict[str, list[float]] = {"kernel": [], "nodes": []}
        places: dict[sizes.Size, tuple[int, int]] = {}
        for index, value in enumerate(part.inputs):
            for axis, size in enumerate(sizes.of(value)):
                if isinstance(size, str):
                    places.setdefault(size, (index, axis))
        self._open = tuple(places.values())
        self._check()

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.chosen == "nodes" or not self._takes(tensors):
            return self._nodes(tensors, ())[0]
        if self.chosen == "kernel":
            return self.kernel(tensors)
        return self._timed(tensors)

    def gain(self) -> float:
        """Seconds that the kernel saves in a call, by the median of the trial."""
        return median(self._seconds["nodes"]) - median(self._seconds["kernel"])

    def _takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        for tensor in tensors:
            if not tensor.is_contiguous():
                return False
        return all(tensors[index].size(axis) >= LEAST_SIZE for index, axis in self._open)

    def _timed(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        by_kernel, by_nodes = self._seconds.values()
        way = "kernel" if len(by_nodes) >= len(by_kernel) else "nodes"
        start = time.perf_counter()
        results = self.kernel(tensors) if way == "kernel" else self._nodes(tensors, ())[0]
        self._seconds[way].append(time.perf_counter() - start)
        if len(by_nodes) == _TRIALS and len(by_kernel) >= _TRIALS:
            self.chosen = "kernel" if self.gain() > 0 else "nodes"
        return results

    def _check(self) -> None:
        drawn = torch.Generator().manual_seed(0)
        inputs = []
        for value in self.part.inputs:
            shape = [_CHECKED_SIZE if isinstance(size, str) else size for size in sizes.of(value)]
            inputs.append(torch.randn(shape, generator=drawn, dtype=TORCH_DTYPES[dtype_of(value)]))
        with torch.no_grad():
            found = self.kernel(inputs)
            expected = self._nodes(inputs, ())[0]
            exact = self._nodes([t.double() for t in inputs], ())[0]
        memory = [t.untyped_storage().data_ptr() for t in (*inputs, *found) if t.numel()]
        if len(set(memory)) < len(memory):
            raise BuildError("the kernel gives memory out that another tensor lies in")
        for got, own, wide in zip(found, expected, exact, strict=True):
            if got.shape != own.shape or got.dtype != own.dtype:
                raise BuildError(f"the kernel gives {got.dtype} {list(got.shape)}, not {own.dtype} {list(own.shape)}")
            error, allowed, _ = compared(got, own, wide)
            if error > allowed:
                raise BuildError(f"the kernel is off by {error:.2g}, where {allowed:.2g} is allowed")
