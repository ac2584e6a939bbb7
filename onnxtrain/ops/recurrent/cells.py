"""The three recurrent cells, and the order of their gates in the weights.

    LSTM    i, f, o = σ(·)   g = tanh(·)   c' = f c + i g   h' = o tanh(c')       Hochreiter & Schmidhuber 1997
    GRU     r, z = σ(·)      n = tanh(W_n x + b_n + r (R_n h + d_n))   h' = (1 - z) n + z h       Cho et al. 2014
    RNN     h' = tanh(·) or relu(·)                                                Elman 1990

where · is W x + b + R h + d of that gate. PyTorch and ONNX order the rows of the gates differently. ONNX's GRU is this
one if linear_before_reset is 1. https://pytorch.org/docs/stable/generated/torch.nn.LSTM.html,
https://onnx.ai/onnx/operators/onnx__LSTM.html
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer.

    Attributes:
        name: its name in ONNX.
        torch: PyTorch's order of the gates, one letter each.
        onnx: ONNX's order of the gates, one letter each.
        saved: the values of a step that backward needs besides h and c, one letter each: gates and, for a GRU, "m",
            which is R_n h + d_n. The gradient of an RNN needs only h.
        has_state: whether there is a cell state c besides h.
    """

    name: str
    torch: str
    onnx: str
    saved: str
    has_state: bool = False

    @property
    def gates(self) -> int:
        return len(self.torch)


LSTM = Cell("LSTM", "ifgo", "iofg", "ifgo", has_state=True)
GRU = Cell("GRU", "rzn", "zrn", "rznm")
RNN = Cell("RNN", "h", "h", "")
CELLS = (LSTM, GRU, RNN)


def gate_indices(source: str, target: str) -> list[int]:
    """Return the index in the order `source` of each gate of the order `target`."""
    return [source.index(gate) for gate in target]
