"""What PyTorch's recurrent modules become: a layer after the other, with dropout between them.

    lstm(x, (h0, c0), weights, layers=2)  ──>  LSTMLayer(x, ...), Dropout, LSTMLayer(...); the last states joined

What stays an ATen node, and why, stands in docs/explanation/aten.md: projections (proj_size), a GRU or RNN under
autocast on a CPU, and all on a GPU, where eager PyTorch runs cuDNN's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of, is_float
from onnxtrain.ops.aten_node import AutocastState, ambient
from onnxtrain.ops.random.dropout import dropped_out
from onnxtrain.ops.recurrent.cells import GRU, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.layer import WEIGHTS
from onnxtrain.ops.registry import compose
from onnxtrain.ops.reshape.dims import transposed
from onnxtrain.ops.reshape.join import concatenated, split

_TIME_FIRST = [1, 0, 2]


def computes_in_one_type(operator: str, autocast: AutocastState) -> bool:
    """Whether all of a recurrent layer is computed in one element type, with autocast in this state.

    So it is where one kernel of a library computes it: an LSTM on a CPU.
    """
    return operator == "aten.lstm.input" or not autocast


def _capture(cell: Cell, activation: str | None) -> Callable[..., Any]:
    def capture(
        op: Builder,
        x: ir.Value,
        hx: Any,
        params: Sequence[ir.Value],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        firsts = list(hx) if cell.has_state else [hx]
        count = 2 if bidirectional else 1
        each = 4 if has_biases else 2
        if len(params) != num_layers * count * each or not is_float(dtype_of(x)):
            return NotImplemented
        if op.device != "cpu" or not computes_in_one_type(f"aten.{cell.name.lower()}.input", ambient()):
            return NotImplemented
        y = x
        if batch_first:  # a copy: kernels of both passes read it so, and each would make its own
            y = op.own.Clone(transposed(op, x, _TIME_FIRST), memory_format="contiguous_format")
        states = [split(op, first, [count] * num_layers, 0) for first in firsts]
        last: list[Sequence[ir.Value]] = []
        for number, first in enumerate(zip(*states, strict=True)):
            if number:
                y = dropped_out(op, y, dropout, train)[0]
            start = number * count * each
            rows = [params[start + d * each : start + (d + 1) * each] for d in range(count)]
            weights = [w for row in rows for w in (*row, *[None] * (len(WEIGHTS) // 2 - each))]
            y, *rest = op.op(OWN, f"{cell.name}Layer")(y, *first, *weights, activation=activation)
            last.append(rest[: len(firsts)])
        found = [concatenated(op, layers, 0) for layers in zip(*last, strict=True)]
        return transposed(op, y, _TIME_FIRST) if batch_first else y, *found

    return capture


# The operators, by PyTorch's names: `capture` treats them as one.
OPERATORS = {
    "aten.lstm.input": _capture(LSTM, None),
    "aten.gru.input": _capture(GRU, None),
    "aten.rnn_tanh.input": _capture(RNN, None),
    "aten.rnn_relu.input": _capture(RNN, "Relu"),
}
compose(OPERATORS)
