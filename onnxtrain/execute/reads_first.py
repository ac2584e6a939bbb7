"""A recorded program whose sizes depend on the labels: they are read before it is replayed.

    labels ──reads──> rows with a label ──fill──> few numbers of rows ──rest, recorded──> results

A recording is for exact sizes, and no two batches have the same number of labels. Rows without a label, which the
loss ignores, are therefore added, up to a number of rows for which there is a recording. That number is chosen for each
batch from its number of labels, so that no label is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from onnxtrain.execute.program import Program, drain
from onnxtrain.plan.streams import SplitAtReads

Results = tuple[tuple[Any, ...], tuple[int, ...]]


class ReadsFirst:
    """Runs a part in two programs: its early reads, then the rest."""

    def __init__(self, parts: SplitAtReads, inputs: Sequence[Any], reads: Program, rest: Program) -> None:
        """Join the programs of `parts`; `inputs`: those of the part."""
        self._positions = [inputs.index(value) for value in parts.reads.inputs]
        self._filled, self._crossing = parts.filled, len(parts.rest.inputs) - len(inputs)
        self._reads, self._rest = reads, rest

    def run(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Results:
        tensors = list(tensors)
        outputs = list(self._reads.run([tensors[i] for i in self._positions], ())[0])
        for source, index, fill in self._filled:
            outputs[index] = fill(outputs[source], outputs[index])
        tensors += outputs[: self._crossing]
        outputs.clear()
        return self._rest.run(drain(tensors), sizes_in)
