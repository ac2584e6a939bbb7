"""Building blocks for training graphs. Each appends nodes and returns the name of its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxtrain.device.block import Block, current_base
from onnxtrain.errors import ArtifactError


class _Binary(Block):
    op_type = ""

    def build(self, left: str, right: str) -> str:
        return current_base().append(self.op_type, [left, right])


class Add(_Binary):
    """left + right, with broadcasting."""

    op_type = "Add"


class Sub(_Binary):
    """left - right, with broadcasting."""

    op_type = "Sub"


class Mul(_Binary):
    """left * right, with broadcasting."""

    op_type = "Mul"


class Div(_Binary):
    """left / right, with broadcasting."""

    op_type = "Div"


class _Unary(Block):
    op_type = ""

    def build(self, name: str) -> str:
        return current_base().append(self.op_type, [name])


class Sigmoid(_Unary):
    """1 / (1 + exp(-x))."""

    op_type = "Sigmoid"


class Log(_Unary):
    """The natural logarithm."""

    op_type = "Log"


class Neg(_Unary):
    """-x."""

    op_type = "Neg"


class Abs(_Unary):
    """|x|."""

    op_type = "Abs"


class Pow(Block):
    """x to the power `exponent`."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, name: str) -> str:
        base = current_base()
        exponent = base.constant(np.asarray(self._exponent, np.float32), "pow_exponent")
        return base.append("Pow", [name, exponent])


class _Reduce(Block):
    op_type = ""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._keepdims = keepdims

    def build(self, name: str) -> str:
        return current_base().append(self.op_type, [name], keepdims=int(self._keepdims))


class ReduceMean(_Reduce):
    """The mean of all elements; a scalar, or of x's rank with `keepdims`."""

    op_type = "ReduceMean"


class ReduceSum(_Reduce):
    """The sum of all elements; a scalar, or of x's rank with `keepdims`."""

    op_type = "ReduceSum"


class ReduceAllL2(Block):
    """The 2-norm over all elements of all tensors: a scalar."""

    def build(self, *names: str) -> str:
        base = current_base()
        squares = [base.append("ReduceSum", [base.append("Mul", [name, name])], keepdims=0) for name in names]
        return base.append("Sqrt", [base.append("Sum", squares)], "reduceall_l2")


class Constant(Block):
    """A float32 scalar."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def build(self) -> str:
        return current_base().constant(np.asarray(self._value, np.float32))


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *names: str) -> str:
        return current_base().append("SequenceConstruct", names)


class Clip(Block):
    """x clamped to [`clip_min`, `clip_max`]; None: no bound."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = (clip_min, clip_max)

    def build(self, name: str) -> str:
        base = current_base()
        bounds = ["" if b is None else base.constant(np.asarray(b, np.float32), "clip_bound") for b in self._bounds]
        return base.append("Clip", [name, *bounds])


class PassThrough(Block):
    """The identity."""

    def build(self, *names: str) -> Any:
        return names[0] if len(names) == 1 else names


class InputLike(Block):
    """A new graph input with the dtype and shape of the value `like`."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, name: str) -> str:
        base = current_base()
        return base.add_input(name, *base.type_of(self._like))


class LabelEncoder(Block):
    """Map keys to values with the op of ai.onnx.ml. Takes one `keys_*` and one `values_*` list of equal length.

    Raises:
        ArtifactError: a list is missing or given twice, or the lengths differ.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        keys = {"keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings}
        values = {"values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings}
        given_lists = [{n: list(v) for n, v in lists.items() if v is not None} for lists in (keys, values)]
        lengths = {len(v) for lists in given_lists for v in lists.values()}
        if any(len(lists) != 1 for lists in given_lists) or len(lengths) != 1:
            got = ", ".join(f"{n}: {len(v)}" for lists in given_lists for n, v in lists.items())
            raise ArtifactError(
                "LabelEncoder expects one list of keys and one list of values of equal length.", got=got
            )
        self._attributes: dict[str, Any] = {
            **given_lists[0],
            **given_lists[1],
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
        }

    def build(self, name: str) -> str:
        base = current_base()
        encoded = base.append("LabelEncoder", [name], domain="ai.onnx.ml", **self._attributes)
        imports = {o.domain: o for o in base.model.opset_import}
        imports["ai.onnx.ml"].version = max(2, imports["ai.onnx.ml"].version)
        return encoded


class Cast(Block):
    """x cast to the element type `to`, an integer of onnx.TensorProto."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, name: str) -> str:
        return current_base().append("Cast", [name], to=self._to)


class Linear(Block):
    """alpha * x @ weight.T + beta * bias, with new parameters `<name>.weight`[out, in] and `<name>.bias`[out].

    They are initialized as in nn.Linear: uniform in ± 1/sqrt(in_features).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        alpha: float = 1.0,
        beta: float = 1.0,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self._sizes, self._bias = (in_features, out_features), bias
        self._alpha, self._beta = alpha, beta
        self._generator = np.random.default_rng(seed)

    def build(self, name: str) -> str:
        base = current_base()
        in_features, out_features = self._sizes
        bound = 1 / math.sqrt(in_features)
        inputs = [name, base.constant(self._uniform((out_features, in_features), bound), "linear.weight")]
        if self._bias:
            inputs.append(base.constant(self._uniform((out_features,), bound), "linear.bias"))
        return base.append("Gemm", inputs, "linear", alpha=self._alpha, beta=self._beta, transB=1)

    def _uniform(self, shape: tuple[int, ...], bound: float) -> Any:
        return self._generator.uniform(-bound, bound, shape).astype(np.float32)
