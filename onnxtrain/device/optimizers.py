"""Optimizer graphs: one update of all trainable parameters.

    (learning_rate, step, <p>…, <p>_grad…, <p>.<state>…) -> (<p>.out…, <p>.<state>.out…)

`step` is how many updates were made before: 0 at the first. The graph computes the corrections of bias from it in
float32, to float32's precision also where 1 - 0.999 would have lost half its digits.

An update is some ten passes over memory, since onnxruntime joins none of them. So a large parameter, its gradient and
its states are taken as [chunks, elements], and a Scan updates one chunk after the other, which stays in the cache
(a million parameters: 1.4 and 1.7 times as fast in two runs, ten million: 2.3). Both sizes are open: the host says
them, and [1, all] is the plain update. Portable graphs have none of this: on a GPU it would only cost.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import onnx
import onnx_ir as ir

from onnxtrain.device.accumulation import GRADIENT
from onnxtrain.device.block import Block, ForwardBlock, current_base
from onnxtrain.device.in_place import verify_updates
from onnxtrain.device.stock import for_stock
from onnxtrain.device.training_graph import UPDATED, annotate
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, is_float, set_type, type_of
from onnxtrain.ops import builder
from onnxtrain.ops.bodies import body_of, build_body, close
from onnxtrain.ops.constructors import cast
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.fused import axes_constant, times
from onnxtrain.ops.recurrent.scan import scan

FLOAT = ir.DataType.FLOAT
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_EPSILON = 1e-6  # what PyTorch's clip_grad_norm_ adds to the norm
_TERMS = 7  # of the series below: its error at the limit is below float32's
_SERIES_BELOW = 0.25
_IN_CHUNKS_FROM = 2**15  # elements; of fewer, the Scan costs as much as it saves (65,536: 1.3 times as fast)

Parameters = Sequence[tuple[str, TensorType]]
# (builder, weight, gradient, states…) -> (new weight, new states…), of a parameter or a chunk of it
Rule: TypeAlias = Callable[..., Sequence[ir.Value]]


class ClipGradNorm(Block):
    """Scales gradients so that their norm, over all together, is at most `max_norm`; as clip_grad_norm_ of PyTorch.

    Args:
        max_norm: of the Euclidean norm.

    Raises:
        ArtifactError: max_norm is not above 0.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        if not max_norm > 0:
            raise ArtifactError("Gradients are clipped to a norm above 0.", got=max_norm)
        self.max_norm = max_norm

    def build(self, *gradients: str) -> list[str]:
        """Appends the nodes for float32 gradients of these names; gives the clipped ones' names."""
        base = current_base()
        squares = [base.append("ReduceSum", [base.append("Mul", [g, g])], keepdims=0) for g in gradients]
        norm = base.append("Sqrt", [base.append("Sum", squares)], "norm")
        above = base.append("Add", [norm, base.constant(_scalar(_EPSILON))])
        factor = base.append("Div", [base.constant(_scalar(self.max_norm)), above])
        factor = base.append("Min", [factor, base.constant(_scalar(1.0))], "clip_factor")
        return [base.append("Mul", [g, factor], f"{g}_clipped") for g in gradients]

    def ahead_of(self, rule: Rule, op: Builder, gradients: Sequence[ir.Value]) -> Rule:
        """The same in a typed graph, for gradients of any floating type: the rule for gradients that are clipped."""
        squares = [cast(op, _sum_of_squares(op, _widened(op, g)), FLOAT) for g in gradients]
        norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
        factor = op.Div(op.scalar(self.max_norm, FLOAT), op.Add(norm, op.scalar(_EPSILON, FLOAT)))
        factor = op.Min(factor, op.scalar(1.0, FLOAT))

        def clipped(op: Builder, weight: ir.Value, gradient: ir.Value, *states: ir.Value) -> Sequence[ir.Value]:
            wide = _widened(op, gradient)
            return rule(op, weight, op.Mul(wide, cast(op, factor, dtype_of(wide))), *states)

        return clipped


def _widened(op: Builder, x: ir.Value) -> ir.Value:
    """Half precision as float32."""
    return cast(op, x, FLOAT) if dtype_of(x) in _HALF else x


def _sum_of_squares(op: Builder, x: ir.Value) -> ir.Value:
    """As a product of vectors: one pass, where onnxruntime's ReduceSum over all axes also loses digits."""
    row, column = (op.Reshape(x, op.constant(shape, ir.DataType.INT64)) for shape in ([1, -1], [-1, 1]))
    result: ir.Value = op.Reshape(op.MatMul(row, column), op.constant([], ir.DataType.INT64))
    return result


def _scalar(number: float) -> Any:
    return onnx.numpy_helper.to_array(onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [number]))


class Optimizer(ForwardBlock):
    """The base of optimizers.

    Attributes:
        state: the names of what is kept for each parameter, zeros at first.
    """

    state: tuple[str, ...] = ()

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    @abstractmethod
    def _rule(self, op: Builder, learning_rate: ir.Value, step: ir.Value) -> Rule:
        """Appends what all parameters share; gives how one of them is updated. The rate is 0-dimensional."""

    def build(self, parameters: Sequence[onnx.TensorProto]) -> list[str]:
        types = [(t.name, TensorType(ir.DataType(t.data_type), tuple(t.dims))) for t in parameters]
        model = ir.to_proto(self.model(types))
        base = current_base()
        if base.model.graph.node:
            raise ArtifactError("An optimizer is a graph of its own.", todo="build it inside `with empty_base():`")
        base.model.CopyFrom(model)
        return [v.name for v in model.graph.output]

    def model(self, parameters: Parameters, *, portable: bool = False) -> ir.Model:
        """The graph as it is written.

        Args:
            parameters: names and types of the trainable parameters.
            portable: whether it is restricted to the portable profile.

        Raises:
            ArtifactError: no parameters, or one that is not floating.
        """
        _refuse(parameters)
        graph = ir.Graph([], [], nodes=[], opset_imports={ONNX: OPSET}, name="optimizer")
        op = builder(graph)
        rate, step = (
            _declare(graph, "learning_rate", TensorType(FLOAT, (1,))),
            _declare(graph, "step", TensorType(ir.DataType.INT64, (1,))),
        )
        in_chunks = [name for name, kind in parameters if not portable and _size(kind) > _IN_CHUNKS_FROM]
        kinds = {n: _chunked(kind, index) if n in in_chunks else kind for index, (n, kind) in enumerate(parameters)}
        wide = {name: FLOAT if kind.dtype in _HALF else kind.dtype for name, kind in parameters}
        moments = {name: TensorType(wide[name], kind.shape) for name, kind in kinds.items()}
        groups = {"": kinds, GRADIENT: kinds} | {f".{state}": moments for state in self.state}
        columns = [[_declare(graph, f"{n}{end}", kind) for n, kind in own.items()] for end, own in groups.items()]
        rule = self._rule(op, op.Squeeze(rate, axes_constant(op, [0])), step)
        if self._clip_grad is not None:
            rule = self._clip_grad.ahead_of(rule, op, columns[1])
        rows = zip(kinds, zip(*columns, strict=True), strict=True)
        found = [_in_chunks(op, rule, row) if name in in_chunks else rule(op, *row) for name, row in rows]
        updated = [*kinds, *(f"{name}.{s}" for s in self.state for name in kinds)]
        close(graph, [v for column in zip(*found, strict=True) for v in column], [f"{n}{UPDATED}" for n in updated])
        return self._written(ir.Model(graph, ir_version=10), parameters, updated, in_chunks, wide, portable)

    def _written(
        self,
        model: ir.Model,
        parameters: Parameters,
        updated: Sequence[str],
        in_chunks: Sequence[str],
        wide: dict[str, ir.DataType],
        portable: bool,
    ) -> ir.Model:
        result = for_stock(model, portable=portable)
        updates = {f"{name}{UPDATED}": name for name in updated}
        annotate(
            result,
            "optimizer",
            inputs=["learning_rate", "step"],
            outputs=[],
            trainable=[name for name, _ in parameters],
            frozen=[],
            buffers=[],
            updates=updates,
            optimizer=type(self).__name__,
            state=list(self.state),
            in_chunks=in_chunks,
            state_dtype={name: dtype.numpy().name for name, dtype in wide.items()},
            portable=portable,
        )
        verify_updates(result, updates)
        return result


def _declare(graph: ir.Graph, name: str, kind: TensorType) -> ir.Value:
    value = ir.Value(name=name)
    set_type(value, kind)
    graph.inputs.append(value)
    return value


def _size(kind: TensorType) -> int:
    return math.prod(int(size) for size in kind.shape)


def _chunked(kind: TensorType, number: int) -> TensorType:
    return TensorType(kind.dtype, (f"chunks_{number}", f"elements_{number}"))


def _in_chunks(op: Builder, rule: Rule, values: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The rule for one chunk after the other. onnxruntime's Scan copies nothing: it works on the slices themselves."""

    def step(
        op: Builder, states: Sequence[ir.Value], slices: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        outputs = list(rule(op, *slices))
        for node in [n for n in op.graph if body_of(n) is not None]:  # functions do not reach into a Scan
            for old, new in zip(list(node.outputs), build_body(op, node, node.inputs), strict=True):
                assert new is not None
                old.replace_all_uses_with(new)
                outputs = [new if value is old else value for value in outputs]
            op.graph.remove(node, safe=True)
        return [], outputs

    return scan(op, [], values, step, reverse=False)[1]


def _refuse(parameters: Parameters) -> None:
    if not parameters:
        raise ArtifactError("There is nothing to optimize.", expected="at least one trainable parameter")
    wrong = [f"{name}, {kind.dtype.name.lower()}" for name, kind in parameters if not is_float(kind.dtype)]
    if wrong:
        raise ArtifactError("An optimizer changes floating parameters.", got="; ".join(wrong))


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019), as PyTorch has it or as onnxruntime-training had it.

    Args:
        bias_correction: whether moments are corrected for having begun at 0.
        betas: how much of the first and second moment is kept.
        eps: added to the root of the second moment.
        weight_decay: the share of a weight that is taken off in each step, times the learning rate.
        clip_grad: clips gradients before the step.
        mode: "torch": eps is added to the corrected root, and weights decay before the update. "huggingface", which is
            onnxruntime-training's: eps is added to the root before it is corrected, and weights decay after.

    Raises:
        ArtifactError: a number out of range.
    """

    state = ("first_order_moment", "second_order_moment")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
        *,
        mode: Literal["torch", "huggingface"] = "huggingface",
    ) -> None:
        super().__init__(clip_grad)
        if not all(0 <= beta < 1 for beta in betas) or eps < 0 or weight_decay < 0:
            expected = "betas from 0 to below 1, eps and weight_decay not below 0"
            raise ArtifactError("AdamW cannot use these numbers.", None, expected, (betas, eps, weight_decay))
        if mode not in ("torch", "huggingface"):
            raise ArtifactError("There is no such mode of AdamW.", expected="torch, huggingface", got=mode)
        self._bias_correction = bias_correction
        self._betas, self._eps, self._weight_decay, self._mode = betas, eps, weight_decay, mode

    def _rule(self, op: Builder, learning_rate: ir.Value, step: ir.Value) -> Rule:
        step_size, epsilon = learning_rate, op.scalar(self._eps, FLOAT)
        if self._bias_correction:
            first, second = _corrections(op, step, self._betas)
            root = op.Sqrt(second)
            # m/first / (sqrt(v)/root + eps) = (root/first) * m / (sqrt(v) + eps*root)
            step_size = op.Mul(learning_rate, op.Div(root, first))
            if self._mode == "torch":
                epsilon = op.Mul(root, epsilon)
        decay = None
        if self._weight_decay:
            decay = op.Sub(op.scalar(1.0, FLOAT), times(op, learning_rate, self._weight_decay))

        def rule(op: Builder, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Sequence[ir.Value]:
            scalars = [None if s is None else cast(op, s, dtype_of(m)) for s in (step_size, epsilon, decay)]
            how = {"beta1": self._betas[0], "beta2": self._betas[1], "decay_last": int(self._mode == "huggingface")}
            found: Sequence[ir.Value] = op.own.AdamWStep(w, g, m, v, *scalars, **how)
            return found

        return rule


def _corrections(op: Builder, step: ir.Value, betas: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
    """1 - beta^t for each beta, with t = step + 1, to float32's precision.

    With x = -t log(beta) that is 1 - exp(-x). For small x, where the subtraction would cancel digits, it is the series
    x - x²/2 + x³/6 - ... Each of both is computed for both betas at once.
    """
    if 0.0 in betas:
        return _each_correction(op, step, betas[0]), _each_correction(op, step, betas[1])
    t = op.Cast(op.Add(step, op.constant([1], ir.DataType.INT64)), to=FLOAT)
    x = op.Mul(op.constant([[-math.log(beta)] for beta in betas], FLOAT), t)  # [2, 1]
    powers = op.Pow(x, op.constant([float(k) for k in range(1, _TERMS + 1)], FLOAT))  # [2, 7]
    signs = op.constant([[(-1) ** (k + 1) / math.factorial(k)] for k in range(1, _TERMS + 1)], FLOAT)
    series = op.MatMul(powers, signs)
    whole = op.Sub(op.scalar(1.0, FLOAT), op.Exp(op.Neg(x)))
    both = op.Where(op.Less(x, op.scalar(_SERIES_BELOW, FLOAT)), series, whole)
    first, second = op.Split(op.Reshape(both, op.constant([2], ir.DataType.INT64)), axis=0, num_outputs=2)
    axis = axes_constant(op, [0])
    return op.Squeeze(first, axis), op.Squeeze(second, axis)


def _each_correction(op: Builder, step: ir.Value, beta: float) -> ir.Value:
    return op.scalar(1.0, FLOAT) if beta == 0 else _corrections(op, step, (beta, beta))[0]


class SGD(Optimizer):
    """Stochastic gradient descent, with or without momentum, as PyTorch has it (dampening 0, no Nesterov).

    Args:
        clip_grad: clips gradients before the step.
        momentum: how much of the last update is kept.
        weight_decay: the share of the weight that is added to the gradient.

    Raises:
        ArtifactError: a number out of range.
    """

    def __init__(
        self, clip_grad: ClipGradNorm | None = None, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(clip_grad)
        if not 0 <= momentum < 1 or weight_decay < 0:
            expected = "momentum from 0 to below 1, weight_decay not below 0"
            raise ArtifactError("SGD cannot use these numbers.", None, expected, (momentum, weight_decay))
        self._momentum, self._weight_decay = momentum, weight_decay
        if momentum:
            self.state = ("momentum_buffer",)

    def _rule(self, op: Builder, learning_rate: ir.Value, step: ir.Value) -> Rule:
        def rule(op: Builder, weight: ir.Value, gradient: ir.Value, *buffers: ir.Value) -> Sequence[ir.Value]:
            wide = FLOAT if dtype_of(weight) in _HALF else dtype_of(weight)
            gradient, rate = cast(op, gradient, wide), cast(op, learning_rate, wide)
            if self._weight_decay:
                gradient = op.Add(gradient, times(op, cast(op, weight, wide), self._weight_decay))
            if buffers:
                found: Sequence[ir.Value] = op.own.SGDStep(weight, gradient, *buffers, rate, momentum=self._momentum)
                return found
            return [cast(op, op.Sub(cast(op, weight, wide), op.Mul(gradient, rate)), type_of(weight).dtype)]

        return rule
