"""TrainingBlock: a block whose `build` appends a loss, and whose graph gets the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain.device.block import Base, Block, current_base, names_of, parameters_of, set_outputs
from onnxtrain.device.from_onnx import convert, prepare, statistics
from onnxtrain.device.training_graph import Roles, eval_model, training_model
from onnxtrain.errors import ArtifactError


@dataclass(frozen=True)
class ParameterChoice:
    """The parameters to train, and those that are frozen inputs of the graphs, by name. All others are constants."""

    trainable: Sequence[str]
    frozen: Sequence[str]


class ForwardWithLoss:
    """A forward graph that a block has extended by a loss.

    Args:
        base: not modified.
        outputs: the names that the block returned, the loss first.
        forward_outputs: the outputs of the model before.
    """

    def __init__(self, base: Base, outputs: Sequence[str], forward_outputs: Sequence[str]) -> None:
        self._model = prepare(base.with_data())
        self._outputs = list(outputs)
        self._forward_outputs = [name for name in forward_outputs if name not in outputs]
        self._updates = base.updates
        self.buffers = dict.fromkeys((*base.buffers, *statistics(self._model)))

    def parameters(self) -> Mapping[str, ir.TensorProtocol]:
        """Return the data of all initializers."""
        initializers = self._model.graph.initializers.items()
        return {name: value.const_value for name, value in initializers if value.const_value is not None}

    def training(self, choice: ParameterChoice, *, portable: bool = False) -> ir.Model:
        """Build the graph of a training step."""
        return training_model(*self._forward(choice, self._outputs, training=True), portable=portable)

    def evaluation(self, choice: ParameterChoice, *, portable: bool = False) -> ir.Model:
        """Build the graph of an evaluation."""
        outputs = [*self._outputs, *self._forward_outputs]
        return eval_model(*self._forward(choice, outputs, training=False), portable=portable)

    def ordered(self, choice: ParameterChoice) -> tuple[list[str], list[str], list[str]]:
        """Return the trainable parameters, the frozen ones and the buffers, each in the order of the model."""
        names = list(self._model.graph.initializers)
        in_both = set(choice.trainable) & {*choice.frozen, *self.buffers}
        if in_both:
            raise ArtifactError("A parameter cannot be both trained and frozen.", got=", ".join(sorted(in_both)))
        buffers = [name for name in names if name in self.buffers]
        frozen = [name for name in names if name in choice.frozen and name not in buffers]
        return [name for name in names if name in choice.trainable], frozen, buffers

    def _forward(self, choice: ParameterChoice, outputs: Sequence[str], *, training: bool) -> tuple[ir.Model, Roles]:
        trainable, frozen, buffers = self.ordered(choice)
        missing = {*choice.trainable, *choice.frozen} - {*trainable, *frozen, *buffers, *self._inputs()}
        if missing:
            available = [name for name, tensor in self.parameters().items() if tensor.dtype.is_floating_point()]
            raise ArtifactError(
                "The model has no such parameters.",
                expected=f"some of {', '.join(available[:30])}{', …' if len(available) > 30 else ''}",
                got=", ".join(sorted(missing)),
            )
        names = {*trainable, *frozen, *buffers}
        updates = self._updates if training else {}
        model = convert(self._model, outputs, names, updates, training=training)
        inputs = self._inputs()
        trained = [name for name in inputs if name in choice.trainable]
        return model, Roles(inputs, self._outputs, trainable, frozen, buffers, self._forward_outputs, trained)

    def _inputs(self) -> list[str]:
        """Return the names of the inputs of a call."""
        initializers = self._model.graph.initializers
        return [str(value.name) for value in self._model.graph.inputs if value.name not in initializers]


class TrainingBlock(Block):
    """A block whose `build` returns the loss. The gradients of the chosen parameters are added to its graph."""

    def __init__(self) -> None:
        super().__init__()
        self._requires_grad: dict[str, bool] = {}
        self._base: Base | None = None
        self._extended: ForwardWithLoss | None = None

    def requires_grad(self, name: str, value: bool = True) -> None:
        """Choose a parameter for training; with False, make it a frozen input of the graphs.

        An input of the graph can be chosen too; its gradient is accumulated as a parameter's is.
        """
        self._requires_grad[name] = value

    def __call__(self, *names: Any, **options: Any) -> Any:
        """Run `build`. The first name that it returns is the loss, the others are additional outputs."""
        self._base = current_base()
        before = [v.name for v in self._base.model.graph.output]
        result = super().__call__(*names, **options)
        outputs = names_of(result)
        set_outputs(self._base.model, [*outputs, *(name for name in before if name not in outputs)])
        self._extended = ForwardWithLoss(self._base, outputs, before)
        return result

    @property
    def choice(self) -> ParameterChoice:
        """The parameters chosen by `requires_grad`."""
        chosen = self._requires_grad
        return ParameterChoice(
            [n for n, value in chosen.items() if value], [n for n, value in chosen.items() if not value]
        )

    @property
    def extended(self) -> ForwardWithLoss:
        """The forward graph with its loss. Raises ArtifactError before the first call of the block."""
        if self._extended is None:
            raise ArtifactError("The block has no graph, because it was not called yet.", todo="call the block first")
        return self._extended

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Return (trainable, frozen and buffers). Raises ArtifactError before the first call of the block."""
        trainable, frozen, buffers = self.extended.ordered(self.choice)
        assert self._base is not None
        return parameters_of(self._base, trainable), parameters_of(self._base, [*frozen, *buffers])

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return (training graph, evaluation graph). Raises ArtifactError before the first call of the block."""
        choice = self.choice
        graphs = self.extended.training(choice), self.extended.evaluation(choice)
        return ir.to_proto(graphs[0]), ir.to_proto(graphs[1])
