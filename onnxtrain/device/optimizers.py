"""Optimizer graphs: one step of all trainable parameters.

    (learning_rate, step, <p>…, <p>_grad…, <p>.<state>…) -> (<p>.out…, <p>.<state>.out…)

A block that is called by hand builds a graph with sequences in their place (`optimizer_sequences`).

`step` is the number of steps before: 0 at first. The graph computes the bias corrections from it in float32, to full
float32 precision (1 - 0.999 would lose half the digits).

A step is about ten passes over memory, which onnxruntime does not fuse. So a large parameter, its gradient and its
states have the shape [chunks, elements], and a Scan updates chunk by chunk within the cache (1.7 to 1.9 times as fast
for a million parameters, 2.4 for ten million). Both dimensions are dynamic: the host chooses them, and [1, all] is one
plain update. Portable graphs are not chunked: on a GPU it only costs time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import onnx
import onnx_ir as ir

from onnxtrain.device.accumulation import GRADIENT
from onnxtrain.device.block import Base, Block, ForwardBlock, current_base
from onnxtrain.device.in_place import verify_updates
from onnxtrain.device.optimizer_sequences import sequence_names, take_sequences
from onnxtrain.device.stock import for_stock
from onnxtrain.device.training_graph import UPDATED, annotate
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.values import ONNX, TensorType, dtype_of, is_float, set_type, type_of
from onnxtrain.ops import builder
from onnxtrain.ops.bodies import body_of, build_body, close
from onnxtrain.ops.body_parts import cast, int64_vector, mul_scalar
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.recurrent.scan import scan

FLOAT = ir.DataType.FLOAT
_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_EPSILON = 1e-6  # added to the norm, as in PyTorch's clip_grad_norm_
_TERMS = 7  # of the series below: at the limit, its error is below float32 rounding
_SERIES_BELOW = 0.25
_IN_CHUNKS_FROM = 2**15  # elements; below, the Scan costs as much as it saves (65,536: 1.3 times as fast)

Parameters = Sequence[tuple[str, TensorType]]
# (builder, weight, gradient, states…) -> (new weight, new states…), for a parameter or a chunk of it
Rule: TypeAlias = Callable[..., Sequence[ir.Value]]


class ClipGradNorm(Block):
    """Clip gradients to a 2-norm over all of them of at most `max_norm`, as PyTorch's clip_grad_norm_ does.

    Args:
        max_norm: the maximum norm.

    Raises:
        ArtifactError: max_norm is not positive.
    """

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        if not max_norm > 0:
            raise ArtifactError("max_norm must be positive.", got=max_norm)
        self.max_norm = max_norm

    def build(self, *gradients: str) -> list[str] | str:
        """Append nodes for float32 gradients of these names; return the names of the clipped gradients.

        For the name of a sequence of gradients, return that of the clipped sequence.
        """
        base = current_base()
        if len(gradients) == 1 and base.is_sequence(gradients[0]):
            return self._of_sequence(base, gradients[0])
        squares = [base.append("ReduceSum", [base.append("Mul", [g, g])], keepdims=0) for g in gradients]
        factor = self._factor(base, base.append("Sum", squares))
        return [base.append("Mul", [g, factor], f"{g}_clipped") for g in gradients]

    def _factor(self, base: Base, squares: str) -> str:
        above = base.append("Add", [base.append("Sqrt", [squares], "norm"), base.constant(_scalar(_EPSILON))])
        factor = base.append("Div", [base.constant(_scalar(self.max_norm)), above])
        return base.append("Min", [factor, base.constant(_scalar(1.0))], "clip_factor")

    def _of_sequence(self, base: Base, gradients: str) -> str:
        square = _body("square", ["gradient"], [("ReduceSumSquare", ["gradient"], {"keepdims": 0})])
        squares = base.append("SequenceMap", [gradients], "squares", body=square)
        total = base.append("ReduceSum", [base.append("ConcatFromSequence", [squares], axis=0, new_axis=1)], keepdims=0)
        scale = _body("scale", ["gradient", "factor"], [("Mul", ["gradient", "factor"], {})])
        clipped = base.append("SequenceMap", [gradients, self._factor(base, total)], f"{gradients}_clipped", body=scale)
        info = onnx.helper.make_tensor_sequence_value_info(clipped, onnx.TensorProto.FLOAT, None)
        base.model.graph.value_info.append(info)
        return clipped

    def wrap(self, rule: Rule, op: Builder, gradients: Sequence[ir.Value]) -> Rule:
        """Wrap an optimizer's rule with clipping, in a typed graph, for gradients of any floating-point dtype."""
        squares = [cast(op, _sum_of_squares(op, _widened(op, g)), FLOAT) for g in gradients]
        norm = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
        factor = op.Div(op.scalar(self.max_norm, FLOAT), op.Add(norm, op.scalar(_EPSILON, FLOAT)))
        factor = op.Min(factor, op.scalar(1.0, FLOAT))

        def clipped(op: Builder, weight: ir.Value, gradient: ir.Value, *states: ir.Value) -> Sequence[ir.Value]:
            wide = _widened(op, gradient)
            return rule(op, weight, op.Mul(wide, cast(op, factor, dtype_of(wide))), *states)

        return clipped


def _body(name: str, inputs: Sequence[str], nodes: Sequence[tuple[str, list[str], dict[str, Any]]]) -> onnx.GraphProto:
    """Return the graph that a SequenceMap runs on each element. The last of `nodes` gives its output."""
    protos = [
        onnx.helper.make_node(op, values, [f"{name}_{i}"], **attributes)
        for i, (op, values, attributes) in enumerate(nodes)
    ]
    infos = [onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, None) for value in inputs]
    output = onnx.helper.make_tensor_value_info(protos[-1].output[0], onnx.TensorProto.FLOAT, None)
    return onnx.helper.make_graph(protos, name, infos, [output])


def _widened(op: Builder, x: ir.Value) -> ir.Value:
    """Cast half precision to float32."""
    return cast(op, x, FLOAT) if dtype_of(x) in _HALF else x


def _sum_of_squares(op: Builder, x: ir.Value) -> ir.Value:
    """Compute it as a dot product: one pass, and more accurate than onnxruntime's ReduceSum over all axes."""
    row, column = (op.Reshape(x, op.constant(shape, ir.DataType.INT64)) for shape in ([1, -1], [-1, 1]))
    return op.Reshape(op.MatMul(row, column), op.constant([], ir.DataType.INT64))


def _scalar(number: float) -> Any:
    return onnx.numpy_helper.to_array(onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [], [number]))


class Optimizer(ForwardBlock):
    """The base class of optimizers.

    Attributes:
        state: the names of the states of each parameter, initially zero.
    """

    state: tuple[str, ...] = ()

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    @abstractmethod
    def _rule(self, op: Builder, learning_rate: ir.Value, step: ir.Value) -> Rule:
        """Append the nodes that all parameters share; return the update rule of one. `learning_rate` is a scalar."""

    def build(self, parameters: Sequence[onnx.TensorProto] | tuple[list[onnx.TensorProto], ...]) -> list[str]:
        """Make the graph that updates these parameters. Its inputs are sequences (`optimizer_sequences`).

        Args:
            parameters: the trainable ones, or all as `TrainingBlock.parameters` returns them.

        Raises:
            ArtifactError: the parameters have several dtypes.
        """
        is_pair = isinstance(parameters, tuple) and bool(parameters) and isinstance(parameters[0], list)
        trainable: Any = parameters[0] if is_pair else parameters
        types = [(t.name, TensorType(ir.DataType(t.data_type), tuple(t.dims))) for t in trainable]
        model = ir.to_proto(self.model(types, in_sequences=True))
        base = current_base()
        if base.model.graph.node:
            raise ArtifactError(
                "An optimizer cannot be appended to another graph.", todo="build it inside `with empty_base():`"
            )
        base.model.CopyFrom(model)
        return [v.name for v in model.graph.output]

    def model(self, parameters: Parameters, *, portable: bool = False, in_sequences: bool = False) -> ir.Model:
        """Build the finished graph.

        Args:
            parameters: the names and types of the trainable parameters.
            portable: whether the graph is restricted to the portable profile.
            in_sequences: whether the inputs are sequences of tensors.

        Raises:
            ArtifactError: there are no parameters, or one has no floating-point dtype.
        """
        _refuse(parameters)
        graph = ir.Graph([], [], nodes=[], opset_imports={ONNX: OPSET}, name="optimizer")
        op = builder(graph)
        rate, step = (
            _declare(graph, "learning_rate", TensorType(FLOAT, (1,))),
            _declare(graph, "step", TensorType(ir.DataType.INT64, (1,))),
        )
        never_in_chunks = portable or in_sequences
        in_chunks = [name for name, kind in parameters if not never_in_chunks and _size(kind) > _IN_CHUNKS_FROM]
        kinds = {n: _chunked(kind, index) if n in in_chunks else kind for index, (n, kind) in enumerate(parameters)}
        wide = {name: FLOAT if kind.dtype in _HALF else kind.dtype for name, kind in parameters}
        moments = {name: TensorType(wide[name], kind.shape) for name, kind in kinds.items()}
        groups = {"": kinds, GRADIENT: kinds} | {f".{state}": moments for state in self.state}
        columns = [[_declare(graph, f"{n}{end}", kind) for n, kind in own.items()] for end, own in groups.items()]
        rule = self._rule(op, op.Squeeze(rate, int64_vector(op, [0])), step)
        if self._clip_grad is not None:
            rule = self._clip_grad.wrap(rule, op, columns[1])
        rows = zip(kinds, zip(*columns, strict=True), strict=True)
        results = [_in_chunks(op, rule, row) if name in in_chunks else rule(op, *row) for name, row in rows]
        updated = [*kinds, *(f"{name}.{s}" for s in self.state for name in kinds)]
        close(graph, [v for column in zip(*results, strict=True) for v in column], [f"{n}{UPDATED}" for n in updated])
        result = for_stock(ir.Model(graph, ir_version=10), portable=portable)
        updates = {f"{name}{UPDATED}": name for name in updated}
        verify_updates(result, updates)
        sequences = sequence_names(list(kinds), self.state) if in_sequences else {}
        if sequences:
            updates = take_sequences(result.graph, sequences)
        self._annotate(
            result, list(kinds), updates, in_chunks=in_chunks, sequences=sequences, wide=wide, portable=portable
        )
        return result

    def _annotate(
        self,
        model: ir.Model,
        trainable: Sequence[str],
        updates: dict[str, str],
        *,
        in_chunks: Sequence[str],
        sequences: dict[str, list[str]],
        wide: dict[str, ir.DataType],
        portable: bool,
    ) -> None:
        annotate(
            model,
            "optimizer",
            inputs=["learning_rate", "step"],
            outputs=[],
            trainable=trainable,
            frozen=[],
            buffers=[],
            updates=updates,
            optimizer=type(self).__name__,
            state=list(self.state),
            in_chunks=in_chunks,
            sequences=sequences,
            state_dtype={name: dtype.numpy().name for name, dtype in wide.items()},
            portable=portable,
        )


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
    """Apply the rule chunk by chunk. onnxruntime's Scan does not copy slices."""

    def step(
        op: Builder, states: Sequence[ir.Value], slices: Sequence[ir.Value]
    ) -> tuple[Sequence[ir.Value], Sequence[ir.Value]]:
        outputs = list(rule(op, *slices))
        for node in [n for n in op.graph if body_of(n) is not None]:  # a Scan's body cannot call functions
            for old, new in zip(list(node.outputs), build_body(op, node, node.inputs), strict=True):
                assert new is not None
                old.replace_all_uses_with(new)
                outputs = [new if value is old else value for value in outputs]
            op.graph.remove(node, safe=True)
        return [], outputs

    return scan(op, [], values, step, reverse=False)[1]


def _refuse(parameters: Parameters) -> None:
    if not parameters:
        raise ArtifactError("There are no parameters to optimize.", expected="at least one trainable parameter")
    wrong = [f"{name}, {kind.dtype.name.lower()}" for name, kind in parameters if not is_float(kind.dtype)]
    if wrong:
        raise ArtifactError("An optimizer expects parameters of floating-point dtypes.", got="; ".join(wrong))


class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), as in PyTorch or onnxruntime-training.

    Args:
        bias_correction: whether the moments are corrected for their start at 0.
        betas: the decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: the weight decay coefficient, multiplied by the learning rate.
        clip_grad: clips gradients before the step.
        mode: "torch": eps is added to the corrected root, and weights decay before the update. "huggingface", as in
            onnxruntime-training: eps is added to the root before bias correction, and weights decay after the update.

    Raises:
        ArtifactError: an argument is out of range.
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
            expected = "betas in [0, 1), eps >= 0 and weight_decay >= 0"
            raise ArtifactError("An argument of AdamW is out of range.", None, expected, (betas, eps, weight_decay))
        if mode not in ("torch", "huggingface"):
            raise ArtifactError("Unknown mode of AdamW.", expected="torch, huggingface", got=mode)
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
            decay = op.Sub(op.scalar(1.0, FLOAT), mul_scalar(op, learning_rate, self._weight_decay))

        def rule(op: Builder, w: ir.Value, g: ir.Value, m: ir.Value, v: ir.Value) -> Sequence[ir.Value]:
            scalars = [None if s is None else cast(op, s, dtype_of(m)) for s in (step_size, epsilon, decay)]
            attributes = {
                "beta1": self._betas[0],
                "beta2": self._betas[1],
                "decay_last": int(self._mode == "huggingface"),
            }
            return op.own.AdamWStep(w, g, m, v, *scalars, **attributes)

        return rule


def _corrections(op: Builder, step: ir.Value, betas: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
    """1 - beta^t for each beta, with t = step + 1, to float32 precision.

    With x = -t log(beta) it is 1 - exp(-x). For small x, where the subtraction cancels digits, the series
    x - x²/2 + x³/6 - ... is used. Both are computed for both betas at once.
    """
    if 0.0 in betas:
        return _each_correction(op, step, betas[0]), _each_correction(op, step, betas[1])
    t = op.Cast(op.Add(step, op.constant([1], ir.DataType.INT64)), to=FLOAT)
    x = op.Mul(op.constant([[-math.log(beta)] for beta in betas], FLOAT), t)  # [2, 1]
    powers = op.Pow(x, op.constant([float(k) for k in range(1, _TERMS + 1)], FLOAT))  # [2, 7]
    signs = op.constant([[(-1) ** (k + 1) / math.factorial(k)] for k in range(1, _TERMS + 1)], FLOAT)
    series = op.MatMul(powers, signs)
    direct = op.Sub(op.scalar(1.0, FLOAT), op.Exp(op.Neg(x)))
    both = op.Where(op.Less(x, op.scalar(_SERIES_BELOW, FLOAT)), series, direct)
    first, second = op.Split(op.Reshape(both, op.constant([2], ir.DataType.INT64)), axis=0, num_outputs=2)
    axis = int64_vector(op, [0])
    return op.Squeeze(first, axis), op.Squeeze(second, axis)


def _each_correction(op: Builder, step: ir.Value, beta: float) -> ir.Value:
    return op.scalar(1.0, FLOAT) if beta == 0 else _corrections(op, step, (beta, beta))[0]


class SGD(Optimizer):
    """Stochastic gradient descent with optional momentum, as in PyTorch (dampening 0, no Nesterov).

    Args:
        clip_grad: clips gradients before the step.
        momentum: the momentum factor.
        weight_decay: the L2 coefficient: this multiple of the weight is added to the gradient.

    Raises:
        ArtifactError: an argument is out of range.
    """

    def __init__(
        self, clip_grad: ClipGradNorm | None = None, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(clip_grad)
        if not 0 <= momentum < 1 or weight_decay < 0:
            expected = "momentum in [0, 1) and weight_decay >= 0"
            raise ArtifactError("An argument of SGD is out of range.", None, expected, (momentum, weight_decay))
        self._momentum, self._weight_decay = momentum, weight_decay
        if momentum:
            self.state = ("momentum_buffer",)

    def _rule(self, op: Builder, learning_rate: ir.Value, step: ir.Value) -> Rule:
        def rule(op: Builder, weight: ir.Value, gradient: ir.Value, *buffers: ir.Value) -> Sequence[ir.Value]:
            wide = FLOAT if dtype_of(weight) in _HALF else dtype_of(weight)
            gradient, rate = cast(op, gradient, wide), cast(op, learning_rate, wide)
            if self._weight_decay:
                gradient = op.Add(gradient, mul_scalar(op, cast(op, weight, wide), self._weight_decay))
            if buffers:
                return op.own.SGDStep(weight, gradient, *buffers, rate, momentum=self._momentum)
            return [cast(op, op.Sub(cast(op, weight, wide), op.Mul(gradient, rate)), type_of(weight).dtype)]

        return rule
