"""Losses as blocks. Each adds a graph input for its targets unless one of that name exists."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from onnxtrain.device.block import Block, current_base
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import OWN

_REDUCTIONS = ("mean", "sum", "none")


class _Loss(Block):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ArtifactError("Unknown reduction.", expected=", ".join(_REDUCTIONS), got=reduction)
        self._reduction = reduction

    def _reduced(self, name: str) -> str:
        if self._reduction == "none":
            return name
        op_type = "ReduceMean" if self._reduction == "mean" else "ReduceSum"
        return current_base().append(op_type, [name], "loss", keepdims=0)

    def _target(self, loss_input: str, name: str) -> str:
        base = current_base()
        return base.add_input(name, *base.type_of(loss_input)) if not _is_value(name) else name


def _is_value(name: str) -> bool:
    return any(name in node.output for node in current_base().model.graph.node)


class MSELoss(_Loss):
    """The mean squared error.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the loss of float[...] against a target of the same type and shape."""
        inputs = [loss_input_name, self._target(loss_input_name, target_name)]
        return current_base().append("MseLoss", inputs, "loss", OWN, reduction=self._reduction)


class L1Loss(_Loss):
    """The mean absolute error.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the loss of float[...] against a target of the same type and shape."""
        base = current_base()
        difference = base.append("Sub", [loss_input_name, self._target(loss_input_name, target_name)])
        return self._reduced(base.append("Abs", [difference]))


class CrossEntropyLoss(_Loss):
    """Softmax and negative log likelihood, as torch.nn.CrossEntropyLoss with class indices.

    Args:
        weight: the weight of each class.
        reduction: "mean" (weighted, over labels that are not ignored), "sum" or "none".
        ignore_index: the label of elements that do not contribute.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._ignore_index = ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Return the loss of scores[n, c, ...] against labels int64[n, ...]."""
        base = current_base()
        _, shape = base.type_of(scores_input_name)
        if len(shape) < 2 or shape[1] in (0, 1):
            raise ArtifactError(
                f"CrossEntropyLoss expects scores of at least two classes, got {scores_input_name!r}.",
                expected="(samples, classes, ...)",
                got=f"({', '.join(map(str, shape))})",
                todo="use BCEWithLogitsLoss for binary targets or MSELoss for regression, or pass another output",
            )
        if not _is_value(labels_name):
            base.add_input(labels_name, onnx.TensorProto.INT64, [*shape[:1], *shape[2:]])
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            inputs.append(base.constant(np.asarray(self._weight, np.float32), "class_weights"))
        attributes: dict[str, Any] = {"reduction": self._reduction}
        if self._ignore_index is not None:
            attributes["ignore_index"] = self._ignore_index
        return base.append("SoftmaxCrossEntropyLoss", inputs, "loss", **attributes)


class BCEWithLogitsLoss(_Loss):
    """Sigmoid and binary cross entropy, as torch.nn.BCEWithLogitsLoss.

    Args:
        weight: multiplies the loss of each element, with broadcasting.
        reduction: "mean", "sum" or "none".
        pos_weight: the weight of positive targets, per class.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weights = (weight, pos_weight)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Return the loss of logits float[...] against a target of the same type and shape."""
        base = current_base()
        weights = [
            "" if weight is None else base.constant(np.asarray(weight, np.float32), stem)
            for weight, stem in zip(self._weights, ("weight", "pos_weight"), strict=True)
        ]
        inputs = [loss_input_name, self._target(loss_input_name, target_name), *weights]
        while not inputs[-1]:
            inputs.pop()
        return base.append("BinaryCrossEntropyWithLogits", inputs, "loss", OWN, reduction=self._reduction)


__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]
