"""A call of a region: its kernel if that is compiled and takes these tensors, else its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import cast

import torch

from onnxtrain.execute.program import Program
from onnxtrain.execute.regions.request import MIN_DYNAMIC_SIZE
from onnxtrain.execute.tolerance import error_and_bound
from onnxtrain.graph import sizes
from onnxtrain.graph.values import dtype_of
from onnxtrain.log import warn
from onnxtrain.native.build import BuildError
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.plan.cut import Part
from onnxtrain.torch_compat import inductor

Kernel = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_TRIALS = 10  # timed calls of the kernel and of the nodes
_CHECKED_SIZE = 3  # dynamic sizes in the check of a new kernel: odd, so that vectorized loops have a remainder
_CPU = torch.device("cpu")


def load(path: Path) -> Kernel:
    """Load a library that `build` returned: a function of contiguous tensors that returns new tensors.

    Raises:
        BuildError: this PyTorch cannot load it.
    """
    try:
        runner = inductor.CPU_RUNNER.get()(str(path), 1)
    except (RuntimeError, AttributeError) as error:
        raise BuildError(f"loading the library ended with an error: {error}") from error
    return cast(Kernel, runner.run)  # it takes any sequence


class RegionCall:
    """Take the region's inputs and return its outputs as new tensors.

    Attributes:
        part: the region.
        kernel: its compiled form.
        chosen: "kernel" (at first) or "nodes"; None while the two are interleaved and timed.
    """

    def __init__(self, part: Part, kernel: Kernel) -> None:
        """Check the kernel against the nodes.

        Args:
            part: the region.
            kernel: its compiled form.

        Raises:
            BuildError: the kernel's results differ from those of the nodes, or it returns an input.
        """
        self.part, self.kernel = part, kernel
        self._nodes = Program(part, "region", _CPU).run
        self.chosen: str | None = "kernel"
        self._seconds: dict[str, list[float]] = {"kernel": [], "nodes": []}
        sources: dict[sizes.Size, tuple[int, int]] = {}  # (input, axis) of each dynamic size
        for index, value in enumerate(part.inputs):
            for axis, size in enumerate(sizes.dims_of(value)):
                if isinstance(size, str):
                    sources.setdefault(size, (index, axis))
        self._dynamic_axes = tuple(sources.values())
        values = [*part.inputs, *(v for node in part.nodes for v in node.outputs)]
        if not {size for v in values for size in sizes.dims_of(v) if isinstance(size, str)} <= sources.keys():
            raise BuildError("a dimension inside the region does not follow from the shapes of its inputs")
        self.compare([[_CHECKED_SIZE if isinstance(n, str) else n for n in sizes.dims_of(v)] for v in part.inputs])

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        if self.chosen == "nodes" or not self._takes(tensors):
            return self._nodes(tensors, ())[0]
        return self._by_kernel(tensors) if self.chosen == "kernel" else self._timed(tensors)

    def try_both(self) -> None:
        """Interleave and time the kernel and the nodes from now on, then keep the faster."""
        if self.chosen == "kernel":
            self.chosen = None

    def gain(self) -> float:
        """Return the seconds that the kernel saves per call: the difference of the medians of the trial."""
        return median(self._seconds["nodes"]) - median(self._seconds["kernel"])

    def _takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        for tensor in tensors:
            if not tensor.is_contiguous():
                return False
        return all(tensors[index].size(axis) >= MIN_DYNAMIC_SIZE for index, axis in self._dynamic_axes)

    def _by_kernel(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            return self.kernel(tensors)
        except RuntimeError as error:  # a failed kernel has written nothing but its own results
            self.chosen = "nodes"
            warn(f"a fused kernel failed; its operators run unfused from now on: {error}")
            return self._nodes(tensors, ())[0]

    def _timed(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        by_kernel, by_nodes = self._seconds.values()
        variant = "kernel" if len(by_nodes) >= len(by_kernel) else "nodes"
        start = time.perf_counter()
        results = self._by_kernel(tensors) if variant == "kernel" else self._nodes(tensors, ())[0]
        self._seconds[variant].append(time.perf_counter() - start)
        if self.chosen is None and len(by_nodes) >= _TRIALS and len(by_kernel) >= _TRIALS:
            self.chosen = "kernel" if self.gain() > 0 else "nodes"
        return results

    def compare(self, shapes: Sequence[Sequence[int]]) -> None:
        """Compare the kernel with the nodes on random inputs of these shapes.

        Raises:
            BuildError: the kernel's results differ from those of the nodes, or it returns an input.
        """
        generator = torch.Generator().manual_seed(0)
        dtypes = [TORCH_DTYPES[dtype_of(value)] for value in self.part.inputs]
        inputs = [torch.randn(s, generator=generator, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
        with torch.no_grad():
            try:
                results = self.kernel(inputs)
            except RuntimeError as error:
                raise BuildError(f"the kernel raises an error: {error}") from error
            expected = self._nodes(inputs, ())[0]
            exact = self._nodes([t.double() for t in inputs], ())[0]
        memory = [t.untyped_storage().data_ptr() for t in (*inputs, *results) if t.numel()]
        if len(set(memory)) < len(memory):
            raise BuildError("a result of the kernel shares memory with an input or another result")
        for got, want, want64 in zip(results, expected, exact, strict=True):
            if got.shape != want.shape or got.dtype != want.dtype:
                raise BuildError(
                    f"expected {want.dtype} {list(want.shape)} from the kernel, got {got.dtype} {list(got.shape)}"
                )
            largest, bound, _ = error_and_bound(got, want, want64)
            if largest > bound:
                raise BuildError(f"the kernel's error is {largest:.2g}, the tolerance is {bound:.2g}")
