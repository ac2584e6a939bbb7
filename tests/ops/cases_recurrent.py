"""Cases of the recurrent ops, with PyTorch's layers as the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from onnxtrain.ops import builder
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.recurrent import layer_kernels, onnx_layer_kernels
from onnxtrain.ops.recurrent.cells import CELLS
from tests.op_case import OpCase, Spec

Tensor = torch.Tensor
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh, "Relu": torch.rnn_relu}

# Steps and samples. Stock onnxruntime's LSTM and GRU abort the process for a batch of size 0.
SIZES = [{"s": s, "b": b} for s, b in ((5, 3), (1, 1), (9, 1), (1, 7))]
EMPTY = [{"s": 3, "b": 2}, {"s": 3, "b": 0}, {"s": 0, "b": 2}]


def _weight(dims: str) -> Spec:
    """Return the spec of a weight in the range of PyTorch's initial weights for five hidden units."""
    return Spec(dims, low=-0.45, high=0.45)


def _run(name: str, x: Tensor, firsts: Any, weights: list[Tensor], both: bool) -> tuple[Tensor, ...]:
    biased = len(weights) == (8 if both else 4)
    first = tuple(firsts) if name == "LSTM" else firsts[0]
    return FUNCTIONS[name](x, first, weights, biased, 1, 0.0, True, both, False)  # type: ignore[operator,no-any-return]


def _layer(
    name: str, both: bool = False, bias: bool = True, activation: str = "", empty: bool = False, hidden: int = 5
) -> OpCase:
    count, rows, width = 1 + both, GATES[name] * hidden, 3
    firsts = [Spec(f"{count} b {hidden}")] * (1 + (name == "LSTM"))
    direction = [_weight(f"{rows} {width}"), _weight(f"{rows} {hidden}")]
    direction += [_weight(f"{rows}"), _weight(f"{rows}")] if bias else [None, None]

    def reference(x: Tensor, *operands: Tensor | None) -> Any:
        weights = [w for w in operands[len(firsts) :] if w is not None]
        return _run(activation or name, x, operands[: len(firsts)], weights, both)

    label = [*["both"] * both, *["plain"] * (not bias), *["empty"] * empty]
    return OpCase(
        "onnxtrain",
        f"{name}Layer",
        (Spec(f"s b {width}"), *firsts, *direction * count),
        reference,
        {"activation": activation} if activation else {},
        EMPTY if empty else SIZES,
        bodies=not empty,
        label="-".join([*label, *activation.split(), *([str(hidden)] if hidden != 5 else [])]),
    )


LAYERS = [
    *(_layer(name, both) for name in GATES for both in (False, True)),
    _layer("LSTM", both=True, bias=False),
    _layer("GRU", bias=False),
    _layer("LSTM", hidden=1),
    _layer("RNN", both=True, activation="Relu"),
    *(_layer(name, both=True, empty=True) for name in GATES),
]


# ONNX's ops, and the training ops


DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}
REVERSED = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
HIDDEN, WIDTH = 5, 3
ONNX_ORDER = {
    "LSTM": (0, 2, 3, 1),
    "GRU": (1, 0, 2),
    "RNN": (0,),
}  # the index in ONNX's order of each of PyTorch's gates


def _reorder_gates(name: str, weight: Tensor) -> Tensor:
    blocks = weight.chunk(GATES[name])
    return torch.cat([blocks[index] for index in ONNX_ORDER[name]])


def _reversed(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Reverse each sequence from its own end."""
    if lengths is None:
        return x.flip(0)
    steps = torch.arange(x.size(0))[:, None]
    indices = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(0, indices[:, :, None].expand_as(x).to(torch.int64))


def _onnx(
    name: str,
    direction: str,
    activation: str,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    lengths: Tensor | None,
    *firsts: Tensor | None,
) -> tuple[Tensor, ...]:
    """Compute ONNX's op by PyTorch's layer, which lacks direction=reverse and packs sequences of different lengths."""
    count = DIRECTIONS[direction]
    weights = []
    for d in range(count):
        biases = [] if b is None else list(b[d].chunk(2))
        weights += [_reorder_gates(name, v) for v in (w[d], r[d], *biases)]
    zeros = x.new_zeros(count, x.size(1), HIDDEN)
    states = [zeros if f is None else f for f in firsts]
    if direction == "reverse":
        x = _reversed(x, lengths)
    if lengths is None:
        y, *last = _run(activation or name, x, states, weights, count == 2)
    else:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        states = [state[:, order] for state in states]
        first = tuple(states) if name == "LSTM" else states[0]
        y, *last = FUNCTIONS[name](
            packed.data, packed.batch_sizes, first, weights, b is not None, 1, 0.0, True, count == 2
        )  # type: ignore[operator]
        y = pad_packed_sequence(PackedSequence(y, packed.batch_sizes, order, back), total_length=x.size(0))[0]
        last = [state[:, back] for state in last]
    if direction == "reverse":
        y = _reversed(y, lengths)
    return y.unflatten(-1, (count, HIDDEN)).transpose(1, 2), *last


def _lengths(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def _case(
    name: str, direction: str = "forward", op: str = "", firsts: bool = True, bias: bool = True, **more: Any
) -> OpCase:
    count, rows = DIRECTIONS[direction], GATES[name] * HIDDEN
    activation, lengths = more.get("activation", ""), more.get("lengths", False)
    attributes: dict[str, Any] = {"hidden_size": HIDDEN, "direction": direction}
    if name == "GRU":
        attributes["linear_before_reset"] = 1
    if activation:
        attributes["activations"] = [activation] * count
    inputs = [Spec(f"s b {WIDTH}"), _weight(f"{count} {rows} {WIDTH}"), _weight(f"{count} {rows} {HIDDEN}")]
    inputs.append(_weight(f"{count} {2 * rows}") if bias else None)  # type: ignore[arg-type]
    inputs.append(Spec("b", torch.int32, make=_lengths) if lengths else None)  # type: ignore[arg-type]
    inputs += [Spec(f"{count} b {HIDDEN}") if firsts else None] * (1 + (name == "LSTM"))  # type: ignore[list-item]
    words = [direction] + [word for word, flag in (("lengths", lengths), ("alone", not firsts)) if flag]
    return OpCase(
        "com.microsoft" if op else "",
        op or name,
        tuple(inputs),
        lambda *inputs: _onnx(name, direction, activation, *inputs),
        attributes,
        [{"s": 4, "b": 6}] if lengths else SIZES,
        bodies=bool(op) or torch.float32,
        label="-".join([*words, *activation.split()]),
    )


STANDARD = [
    *(_case(name, direction) for name in GATES for direction in DIRECTIONS),
    *(_case(name, "bidirectional", lengths=True) for name in GATES),
    _case("LSTM", firsts=False, bias=False),
    _case("RNN", "bidirectional", activation="Relu"),
]
TRAINING = [
    *(_case(name, direction, f"{name}Training") for name in ("LSTM", "GRU") for direction in DIRECTIONS),
    *(_case(name, direction, f"{name}Training", lengths=True) for name in ("LSTM", "GRU") for direction in DIRECTIONS),
    _case("LSTM", op="LSTMTraining", firsts=False, bias=False),
    _case("GRU", op="GRUTraining", firsts=False, bias=False),
]


# Gradient ops on the values of an actual forward; the cases above run them too, for all sizes


def _fixed(shape: tuple[int, ...], seed: int, scale: float = 0.45) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * scale


def _fixed_spec(make: Callable[[torch.dtype], Tensor], dtype: str | torch.dtype = "float", grad: bool = False) -> Spec:
    """Return the spec of a fixed value in the dtype under test."""
    dims = "k" if dtype == torch.uint8 else " ".join(map(str, make(torch.float32).shape))
    return Spec(dims, dtype, make=lambda shape, tested_dtype, generator: make(tested_dtype), grad=grad)


def _operands(name: str, count: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return x, the initial states, ONNX's w, r and b, and the cotangents of y[s, D, b, h] and the last states."""
    rows, many = GATES[name] * HIDDEN, 1 + (name == "LSTM")
    x, firsts = _fixed((4, 3, WIDTH), 1, 1.0), [_fixed((count, 3, HIDDEN), 2 + i) for i in range(many)]
    weights = [_fixed((count, rows, WIDTH), 5), _fixed((count, rows, HIDDEN), 6), _fixed((count, 2 * rows), 7)]
    cotangents = [_fixed((4, count, 3, HIDDEN), 8), *(_fixed((count, 3, HIDDEN), 9 + i) for i in range(many))]
    return [x], firsts, weights, cotangents


def _differentiated(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(list(outputs), list(leaves), list(cotangents))


def _grad_case(name: str, direction: str) -> OpCase:
    count = DIRECTIONS[direction]
    (x,), firsts, weights, cotangents = _operands(name, count)
    w, r, b = weights
    layer = onnx_layer_kernels.Layer(next(c for c in CELLS if c.name == name), REVERSED[direction], False)

    def saved(index: int) -> Callable[[torch.dtype], Tensor]:
        def make(dtype: torch.dtype) -> Tensor:
            arrays = [v.to(dtype) for v in (x, w, r, b, *firsts)]
            return onnx_layer_kernels.run_layer(layer, 9, *arrays[:4], None, *arrays[4:])[index]

        return make

    def reference(*values: Tensor | None) -> tuple[Tensor, ...]:
        dtype = values[0].dtype  # type: ignore[union-attr]
        leaves = [v.to(dtype, copy=True).requires_grad_() for v in (x, w, r, b, *firsts)]
        with torch.enable_grad():
            outputs = _onnx(name, direction, "", *leaves[:4], None, *leaves[4:])
            return _differentiated(outputs, leaves, [v.to(dtype) for v in cotangents])

    many = len(firsts)
    saved_indices = {"LSTM": (0, 3, 4), "GRU": (0, 2), "RNN": (0,)}[name]
    specs = [_fixed_spec(v.to) for v in (x, w, r)] + ([_fixed_spec(b.to)] if name == "GRU" else [])
    rest = (
        [_fixed_spec(v.to) for v in firsts]
        + [_fixed_spec(saved(i)) for i in saved_indices]
        + [_fixed_spec(v.to) for v in cotangents]
    )
    attributes: dict[str, Any] = {"hidden_size": HIDDEN, "direction": direction}
    if name == "GRU":
        attributes["linear_before_reset"] = 1
    assert many == (2 if name == "LSTM" else 1)
    domain = "onnxtrain" if name == "RNN" else "com.microsoft"
    return OpCase(domain, f"{name}Grad", (*specs, None, *rest), reference, attributes, [{}], label=direction)


def _layer_grad_case(name: str, count: int) -> OpCase:
    (x,), firsts, weights, cotangents = _operands(name, count)
    cell = next(c for c in CELLS if c.name == name)
    by_direction = [(w, r, *b.chunk(2)) for w, r, b in zip(*weights, strict=True)]
    flat = [v for each in by_direction for v in each]
    cotangents = [cotangents[0].transpose(1, 2).flatten(2), *cotangents[1:]]
    tested = torch.float32  # the dtype of the saved bytes: that of x, which is made before them

    def make_x(dtype: torch.dtype) -> Tensor:
        nonlocal tested
        tested = dtype
        return x.to(dtype)

    def saved(index: int) -> Callable[[torch.dtype], Tensor]:
        def make(dtype: torch.dtype) -> Tensor:
            dtype = tested if dtype == torch.uint8 else dtype
            many = [v.to(dtype) for v in (x, *firsts, *([None] if name != "LSTM" else []), *flat) if v is not None]
            arrays: list[Any] = many[: 1 + len(firsts)] + ([] if name == "LSTM" else [None]) + many[1 + len(firsts) :]
            output: Tensor = layer_kernels.layer(cell, False, True, False, *arrays)[index]
            return output

        return make

    def reference(*values: Tensor | None) -> tuple[Tensor, ...]:
        dtype = values[0].dtype  # type: ignore[union-attr]
        leaves = [v.to(dtype, copy=True).requires_grad_() for v in (x, *firsts, *flat)]
        with torch.enable_grad():
            outputs = _run(name, leaves[0], leaves[1 : 1 + len(firsts)], leaves[1 + len(firsts) :], count == 2)
            return _differentiated(outputs, leaves, [v.to(dtype) for v in cotangents])

    states = [_fixed_spec(saved(2))] if name == "LSTM" else []
    memory = [_fixed_spec(saved(1 + len(firsts) + d), torch.uint8) for d in range(count)]
    absent = [None] * (8 - len(flat))
    inputs = (
        *(_fixed_spec(v.to) for v in cotangents),
        *(_fixed_spec(make) for make in (make_x, *(v.to for v in (*firsts, *flat)))),
        *absent,
        _fixed_spec(saved(0)),
        *states,
        *memory,
    )
    return OpCase("onnxtrain", f"{name}LayerGrad", inputs, reference, {}, [{"k": 1}], label=f"{count} directions")


GRADIENTS = [
    *(_grad_case(name, direction) for name in GATES for direction in ("forward", "bidirectional")),
    *(_layer_grad_case(name, count) for name in GATES for count in (1, 2)),
]

# Scan: a running sum, a running product in reverse, and the outputs of all steps


def _running() -> ir.Graph:
    names = ("total", "product", "x", "y")
    inputs = [ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["b"])) for name in names]
    body = ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}, name="running")
    op = builder(body)
    total, product = op.Add(inputs[0], inputs[2]), op.Mul(inputs[1], inputs[3])
    body.outputs.extend([total, product, op.Sub(inputs[0], inputs[3]), op.Mul(product, inputs[2])])
    for index, node in enumerate(body):
        node.name = node.outputs[0].name = f"inner_{index}"
    return body


def _run_on(total: Tensor, product: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    differences, scaled = [], []
    for forth, back in zip(x, reversed(y.unbind(1)), strict=True):
        differences.append(total - back)
        total, product = total + forth, product * back
        scaled.append(product * forth)
    return total, product, torch.stack(differences, 1), torch.stack(list(reversed(scaled)))


SCAN = OpCase(
    "",
    "Scan",
    tuple(Spec(dims, torch.float32) for dims in ("b", "b", "s b", "b s")),
    _run_on,
    {
        "body": _running(),
        "num_scan_inputs": 2,
        "scan_input_axes": [0, 1],
        "scan_input_directions": [0, 1],
        "scan_output_axes": [1, 0],
        "scan_output_directions": [0, 1],
    },
    [{"b": 3, "s": 5}, {"b": 1, "s": 1}],
    differentiate=False,
)
# Stock onnxruntime 1.31 divides by zero for empty slices along another axis than the first.
EMPTY_SCAN = replace(SCAN, sizes=[{"b": 3, "s": 5}, {"b": 0, "s": 2}], bodies=False, label="empty")

CASES = LAYERS + STANDARD + TRAINING + GRADIENTS + [SCAN, EMPTY_SCAN]
