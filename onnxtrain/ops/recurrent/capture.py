"""Capture PyTorch's recurrent modules as one node per layer, with dropout between layers.

    lstm(x, (h0, c0), weights, layers=2)  ──>  LSTMLayer(x, ...), Dropout, LSTMLayer(...); last states concatenated

Some stay ATen nodes, see docs/explanation/aten.md: projections (proj_size), a GRU or RNN under autocast on a CPU, and
all layers on a GPU, where eager PyTorch runs cuDNN's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import OWN, dtype_of, is_float
from onnxtrain.ops.aten_node import AutocastState, autocast_state
from onnxtrain.ops.random.dropout import dropout_nodes
from onnxtrain.ops.recurrent.cells import GRU, LSTM, RNN, Cell
from onnxtrain.ops.recurrent.torch_layers import WEIGHTS
from onnxtrain.ops.registry import register_captures
from onnxtrain.ops.reshape.dims import transposed
from onnxtrain.ops.reshape.join import concatenated, split

_TIME_FIRST = [1, 0, 2]


def computes_in_one_dtype(operator: str, autocast: AutocastState) -> bool:
    """Return whether a recurrent layer is computed in a single dtype under this autocast state.

    Under autocast this holds for operators that are one library kernel: an LSTM on a CPU.
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
        initial_states = list(hx) if cell.has_state else [hx]
        directions = 2 if bidirectional else 1
        weight_count = 4 if has_biases else 2
        if len(params) != num_layers * directions * weight_count or not is_float(dtype_of(x)):
            return NotImplemented
        if op.device != "cpu" or not computes_in_one_dtype(f"aten.{cell.name.lower()}.input", autocast_state()):
            return NotImplemented
        y = x
        if batch_first:  # one contiguous copy here, instead of one in each of the forward and backward kernels
            y = op.own.Clone(transposed(op, x, _TIME_FIRST), memory_format="contiguous_format")
        states_by_layer = [split(op, state, [directions] * num_layers, 0) for state in initial_states]
        last_states: list[Sequence[ir.Value]] = []
        for layer, states in enumerate(zip(*states_by_layer, strict=True)):
            if layer:
                y = dropout_nodes(op, y, dropout, train)[0]
            start = layer * directions * weight_count
            starts = range(start, start + directions * weight_count, weight_count)
            absent_biases = [None] * (len(WEIGHTS) // 2 - weight_count)
            weights = [w for at in starts for w in (*params[at : at + weight_count], *absent_biases)]
            y, *rest = op.op(OWN, f"{cell.name}Layer")(y, *states, *weights, activation=activation)
            last_states.append(rest[: len(initial_states)])
        joined = [concatenated(op, layers, 0) for layers in zip(*last_states, strict=True)]
        return transposed(op, y, _TIME_FIRST) if batch_first else y, *joined

    return capture


# By PyTorch's operators, which the capture does not decompose.
OPERATORS = {
    "aten.lstm.input": _capture(LSTM, None),
    "aten.gru.input": _capture(GRU, None),
    "aten.rnn_tanh.input": _capture(RNN, None),
    "aten.rnn_relu.input": _capture(RNN, "Relu"),
}
register_captures(OPERATORS)
