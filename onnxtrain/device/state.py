"""The state of training in memory: parameters, gradients, optimizer state, counters and properties."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxtrain.device.checkpoint_data import Checkpoint
from onnxtrain.device.sessions import ArtifactMetadata, Buffer, Device, TensorType
from onnxtrain.device.values import Array, dtype_named
from onnxtrain.errors import CheckpointError, TrainingError, UnknownNameError

GRADIENT_BUFFER = "{}_grad.accumulation.buffer"
DEFAULT_LEARNING_RATE = 1e-3
_OTHER_ARTIFACTS = "Use the graphs and the checkpoint of one call of generate_artifacts."


class TrainingState:
    """The memory that the training, eval and optimizer graphs share, with its counters.

    Attributes:
        names: of all parameters and buffers, in the checkpoint's order.
        trainable: those that the optimizer updates.
        nominal: whether the parameters have no values yet.
        gradients: accumulated, by parameter; empty before a training graph is loaded.
        reset_due: whether the next training call resets the gradients.
        optimizer: state name → parameter → memory.
    """

    def __init__(self, content: Checkpoint) -> None:
        self.names = dict.fromkeys(content.parameters)
        self.trainable = frozenset(content.trainable)
        self.nominal = content.nominal
        self.properties = dict(content.properties)
        self.step = content.step
        self.learning_rate = content.learning_rate
        self.seed = content.seed
        self.draws = content.draws
        self.device = Device()
        self._joined = False
        parameters = {} if content.nominal else content.parameters
        self._parameters = {name: Buffer(array, self.device) for name, array in parameters.items()}
        self.gradients = {name: Buffer(array, self.device) for name, array in content.gradients.items()}
        self.reset_due = not content.gradients
        self.optimizer = {
            state: {name: Buffer(array, self.device) for name, array in arrays.items()}
            for state, arrays in content.optimizer.items()
        }

    def parameter(self, name: str) -> Buffer:
        """Return the memory of a parameter.

        Raises:
            UnknownNameError: no parameter has this name.
            TrainingError: the state is nominal and has no values yet.
        """
        if name not in self.names:
            raise UnknownNameError("Unknown parameter.", expected=", ".join(self.names), got=repr(name))
        self.require_values()
        return self._parameters[name]

    def type_of(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and shape of a parameter; of a nominal state after `join_graph`."""
        buffer = self._parameters[name]
        return buffer.dtype, buffer.shape

    def require_values(self) -> None:
        """Raise TrainingError if the state is nominal and has no values."""
        if self.nominal:
            problem = "The state is nominal: its parameters have no values yet."
            todo = "Fill them with Module.copy_buffer_to_parameters(buffer, trainable_only=False)."
            raise TrainingError(problem, todo=todo)

    def fill(self, values: Mapping[str, Array]) -> None:
        """Copy values to parameters. After all have values, the state is no longer nominal."""
        for name, value in values.items():
            self._parameters[name].fill(value)
        self.nominal = self.nominal and values.keys() != set(self.names)

    def join_graph(
        self, metadata: ArtifactMetadata, types: Mapping[str, TensorType], device: Device
    ) -> dict[str, Buffer]:
        """Return the memory that a training or eval graph binds, including gradients.

        Raises:
            CheckpointError: the names, dtypes or shapes of the parameters are not those of the graph.
            TrainingError: the state is in use on another device.
        """
        self._move_to(device)
        self._check_names(metadata)
        if self.nominal:
            for name in types.keys() & self.names.keys() - self._parameters.keys():
                self._parameters[name] = self._zeros(types[name])
        for name, buffer in self._parameters.items():
            if name in types and not types[name].takes(buffer.dtype, buffer.shape):
                problem = "A parameter differs from the graph in dtype or shape."
                raise CheckpointError(problem, repr(name), types[name], buffer, _OTHER_ARTIFACTS)
        for name in metadata.trainable:
            if name not in self.gradients:
                self.gradients[name] = self._zeros(types[GRADIENT_BUFFER.format(name)])
        return self._parameters | {GRADIENT_BUFFER.format(name): buffer for name, buffer in self.gradients.items()}

    def join_optimizer(self, metadata: ArtifactMetadata, types: Mapping[str, TensorType]) -> dict[str, Buffer]:
        """Return the memory that the optimizer graph binds: parameters, gradients and optimizer state.

        Raises:
            CheckpointError: the checkpoint has the state of another optimizer, or the graph belongs to another model.
        """
        if self.gradients.keys() != set(metadata.trainable):
            problem = "The optimizer graph updates different parameters from those that the training graph trains."
            expected_names, names = ", ".join(self.gradients), ", ".join(metadata.trainable)
            raise CheckpointError(problem, None, expected_names, names, _OTHER_ARTIFACTS)
        if self.optimizer and self.optimizer.keys() != set(metadata.state):
            problem = "The checkpoint has the state of another optimizer."
            expected_names, names = ", ".join(metadata.state) or "none", ", ".join(self.optimizer)
            raise CheckpointError(problem, None, expected_names, names, _OTHER_ARTIFACTS)
        for state in metadata.state:
            own = self.optimizer.setdefault(state, {})
            for name in metadata.trainable:
                expected = types[f"{name}.{state}"]
                if name in metadata.in_chunks or metadata.sequences:
                    expected = TensorType(expected.name, expected.dtype, self.type_of(name)[1])
                if name not in own:
                    own[name] = self._zeros(expected)
                elif not expected.takes(own[name].dtype, own[name].shape):
                    problem = "An optimizer state differs from the graph in dtype or shape."
                    raise CheckpointError(problem, f"{name}.{state}", expected, own[name], _OTHER_ARTIFACTS)
        if self.learning_rate is None:
            self.learning_rate = DEFAULT_LEARNING_RATE
        return (
            {name: self._parameters[name] for name in metadata.trainable}
            | {f"{name}_grad": self.gradients[name] for name in metadata.trainable}
            | {f"{name}.{state}": buffer for state, own in self.optimizer.items() for name, buffer in own.items()}
        )

    def content(self) -> Checkpoint:
        """Return the content of a checkpoint of the present state. On the CPU its arrays are views of the memory."""
        self.require_values()
        return Checkpoint(
            parameters={name: self._parameters[name].numpy() for name in self.names},
            trainable=self.trainable,
            optimizer={s: {name: b.numpy() for name, b in own.items()} for s, own in self.optimizer.items()},
            gradients={} if self.reset_due else {name: b.numpy() for name, b in self.gradients.items()},
            step=self.step,
            learning_rate=self.learning_rate,
            seed=self.seed,
            draws=self.draws,
            properties=dict(self.properties),
        )

    def _move_to(self, device: Device) -> None:
        if device != self.device:
            if self._joined:
                problem = "The state is in use on another device."
                raise TrainingError(
                    problem, "device=", self.device, device, "Load the checkpoint again for the other device."
                )
            self.device = device
            for own in (self._parameters, self.gradients, *self.optimizer.values()):
                own.update({name: Buffer(buffer.numpy(), device) for name, buffer in own.items()})
        self._joined = True

    def _check_names(self, metadata: ArtifactMetadata) -> None:
        if missing := [name for name in metadata.parameters if name not in self.names]:
            problem = "The checkpoint lacks parameters of the graph."
            raise CheckpointError(problem, None, ", ".join(missing), ", ".join(self.names), _OTHER_ARTIFACTS)
        if metadata.kind == "training" and self.trainable != set(metadata.trainable):
            problem = "The checkpoint was made for other trainable parameters."
            got = ", ".join(sorted(self.trainable))
            raise CheckpointError(problem, None, ", ".join(metadata.trainable), got, _OTHER_ARTIFACTS)

    def _zeros(self, kind: TensorType) -> Buffer:
        shape = [size for size in kind.shape if isinstance(size, int)]
        if len(shape) != len(kind.shape):
            raise TrainingError("A tensor of the graph has dynamic dimensions.", kind.name, "a static shape", kind)
        return Buffer(np.zeros(shape, dtype_named(kind.dtype)), self.device)
