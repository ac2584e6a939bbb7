"""Would a second compute stream help? A model of launch and run times of a layer on an H100, on fake CUDA tensors.

    python -m tests.gpu_without_one.stream_model        (in the environment of `make test-gpu-plans`)

One stream takes the sum of all kernels' times, or the host's time for the launches if that is longer. Any number of
streams takes at least

* the sum of the kernels' times, each times the share of the GPU that it uses: kernels that use it all run no faster
  beside others, because they share its cores and its memory;
* the longest path of kernels that depend on each other;
* the host's time for the launches, which events only add to.

So one stream's time less the largest of the three is the most that any schedule gains. A kernel's time is the larger
of its floating-point operations and of its bytes over what the GPU does in a second, plus its start. A GEMM of fewer
output tiles than cores uses the others only if the library splits the sum; both are modelled.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch

from onnxtrain.graph import sizes
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.values import dtype_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import numel
from onnxtrain.ops.interfaces.cost import MATMUL_FLOPS, flops_of, flops_per_element
from onnxtrain.plan.cut import Part
from onnxtrain.plan.storage import bind_symbols
from tests.gpu_without_one.fake_gpu import fake_gpu, fake_mode
from tests.gpu_without_one.launches import Launches, captured
from tests.gpu_without_one.models import MODELS

FLOPS = 0.6 * 989e12  # bfloat16, of which GEMMs reach some 60 %
BYTES = 0.8 * 3.35e12
START = 2e-6  # of a kernel
LAUNCH = 5e-6  # by the host, through PyTorch; 0 in a CUDA graph
CORES, TILE, BLOCK = 132, 128, 1 << 13  # a core computes a tile of TILE x TILE, or BLOCK elements, at a time


@dataclass(frozen=True)
class Times:
    """Seconds: the sum of the kernels, that weighted by their share of the GPU, the longest path, and the launches."""

    serial: float
    shared: float
    path: float
    launches: float

    def gain(self, launch: float) -> float:
        """Return the most that other streams save, as a share of one stream's time."""
        host = self.launches * launch
        one = max(self.serial, host)
        return 1 - max(self.shared, self.path, host) / one

    def layers(self, fewer: Times, count: int) -> Times:
        """Return those of a layer, from those of a model with `count` layers fewer."""
        pairs = zip(vars(self).values(), vars(fewer).values(), strict=True)
        return Times(*((more - less) / count for more, less in pairs))


def _share(node: ir.Node, elements: float, splits: bool) -> float:
    """Return the share of the GPU that a kernel uses."""
    is_gemm = flops_per_element(node) >= MATMUL_FLOPS
    if is_gemm and splits:
        return 1.0
    tiles = max(1, math.ceil(elements / (TILE * TILE if is_gemm else BLOCK)))
    return tiles / (math.ceil(tiles / CORES) * CORES) if is_gemm else min(1.0, tiles / CORES)


def times(part: Part, symbol_values: Mapping[str, int], splits: bool) -> Times:
    """Return the times of a part."""
    serial = shared = 0.0
    count, ends = 0, dict[ir.Value, float]()

    def nbytes(value: ir.Value) -> float:
        return sizes.evaluate(numel(value), symbol_values) * dtype_of(value).itemsize

    for node in part.nodes:
        begin = max((ends.get(v, 0.0) for v in node.inputs if v is not None), default=0.0)
        is_view = view_source(node, 0, definition_of(node)) is not None
        if not is_view and not part.host.issuperset(node.outputs):
            flops = sizes.evaluate(flops_of(node), symbol_values)
            tensors = {v for v in (*node.inputs, *node.outputs) if v is not None and v not in part.host}
            elements = sum(sizes.evaluate(numel(v), symbol_values) for v in node.outputs[:1])
            share = _share(node, elements, splits)
            took = START + max(flops / FLOPS / share, sum(map(nbytes, tensors)) / BYTES)
            serial, shared, count = serial + took, shared + took * share, count + 1
            begin += took
        ends.update(dict.fromkeys(node.outputs, begin))
    return Times(serial, shared, max(ends.values(), default=0.0), count)


def parts_of(name: str, layers: int, batch: int, length: int) -> tuple[Part, Part, Mapping[str, int]]:
    """Return forward and backward of a model in bfloat16, and its sizes."""
    mode = fake_mode()
    make, inputs = MODELS[name]
    cropped: Callable[[], dict[str, torch.Tensor]] = lambda: {k: v[:batch, :length] for k, v in inputs().items()}
    capture = captured(lambda: make(layers, 0.0).to(torch.bfloat16), cropped, mode, skip_padding="never")
    with fake_gpu(mode):
        _, backward = capture.run(Launches(), Launches())
    forward = capture.unit.forward.part
    return forward, backward.program.part, bind_symbols(forward.inputs, capture.tensors)


def main() -> None:
    write = sys.stdout.write
    write(
        "model, tokens, direction, GEMMs; kernels; us: one stream, shared, path; gain at most: launched, CUDA graph\n"
    )
    for name in ("bert", "gpt2", "llama"):
        for batch, length in ((8, 512), (2, 128)):
            measured = [parts_of(name, layers, batch, length) for layers in (1, 3)]
            for index, direction in enumerate(("forward", "backward")):
                for splits in (True, False):
                    few, many = (times(parts[index], parts[2], splits) for parts in measured)
                    t = many.layers(few, 2)
                    gemms = "split" if splits else "whole"
                    write(
                        f"{name:6} {batch} x {length:4} {direction:9} {gemms} {t.launches:5.0f}"
                        f" {t.serial * 1e6:9.0f} {t.shared * 1e6:9.0f} {t.path * 1e6:9.0f}"
                        f" {t.gain(LAUNCH):8.1%} {t.gain(0.0):8.1%}\n"
                    )


if __name__ == "__main__":
    main()
