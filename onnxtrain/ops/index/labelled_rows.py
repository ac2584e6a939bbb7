"""The rows that a loss reads.

    LabelledRows(labelled[n]) -> rows[count]     the indices of true elements, in order

Indices of false elements may follow: a loss ignores these rows. Recorded programs have them (`execute.reads_first`), so
that batches with different numbers of labels have equal sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from onnxtrain.graph.values import OWN, TensorType
from onnxtrain.ops.definition import Call, Effects, NodeView
from onnxtrain.ops.index.advanced_indexing import nonzero_indices
from onnxtrain.ops.interfaces.host_reads import HOST_READS, HostRead, PendingInt
from onnxtrain.ops.reshape.movement import define_movement

MIN_STEP = 64  # row counts are multiples of it: the tiles of a GPU's GEMMs have as many rows
STEPS = 8  # row counts from one power of two to the next: rounding costs half a step on average, 5 % of the rows


def rounded_up(count: int) -> int:
    """Round a number of rows up to the next one that programs are recorded for.

    These are 1/16 to 1/8 apart. 500 batches of 16 sequences with random lengths from 1 to 256 have 386 numbers of rows;
    rounded up, 99 % of the batches have one of eight, as many as a program keeps recordings for.
    """
    step = max(MIN_STEP, (1 << max(0, count.bit_length() - 1)) // STEPS)
    return -(-count // step) * step


def _types(n: NodeView) -> Sequence[TensorType]:
    name = "".join(c if c.isalnum() else "_" for c in n.labelled.name or "value")
    return (TensorType(ir.DataType.INT64, (f"count_labelled_{name}",)),)


def _rows(labelled: torch.Tensor) -> torch.Tensor:
    return labelled.nonzero().flatten()


def _counted(labelled: torch.Tensor, count: PendingInt) -> torch.Tensor:
    return torch.nonzero_static(labelled, size=count.result()).flatten()


def _filled(labelled: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add rows without a label, up to a number that programs are recorded for, or to all rows."""
    count = rows.numel()
    others = min(rounded_up(count), labelled.numel()) - count
    return torch.cat([rows, torch.nonzero_static(~labelled, size=others).flatten()]) if others else rows


LABELLED_ROWS = define_movement(
    "LabelledRows",
    ("labelled",),
    _types,
    lambda n, labelled: Call(_rows, labelled),
    None,
    domain=OWN,
    body=lambda op, n: nonzero_indices(op, n.labelled, None)[0],
    effects=Effects.HOST_SYNC,
)
HOST_READS.register(
    LABELLED_ROWS,
    HostRead("labelled", lambda labelled: PendingInt(torch.count_nonzero(labelled)), _counted, _filled),
)
