"""CheckpointState: the parameters and properties of a training by name, loaded from and saved to a file."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from onnxtrain.device import checkpoint
from onnxtrain.device.checkpoint_data import Checkpoint, Property
from onnxtrain.device.state import TrainingState
from onnxtrain.device.values import Array
from onnxtrain.errors import UnknownNameError


class Parameter:
    """A parameter or buffer of the model."""

    def __init__(self, name: str, state: TrainingState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self._name

    @property
    def requires_grad(self) -> bool:
        """Whether the optimizer updates it."""
        return self._name in self._state.trainable

    @property
    def data(self) -> Array:
        """The values; on the CPU, a view of the memory, so that writing to it changes the model; else a copy.

        Assigning copies an array of the same shape and dtype into that memory.

        Raises:
            TrainingError: the state is nominal and has no values yet, or the shape or dtype differs.
        """
        return self._state.parameter(self._name).numpy()

    @data.setter
    def data(self, value: Array) -> None:
        self._state.parameter(self._name).fill(np.asarray(value))

    @property
    def grad(self) -> Array | None:
        """The accumulated gradient since the last reset; None without a `Module`, or if not trainable."""
        buffer = self._state.gradients.get(self._name)
        return None if buffer is None else buffer.numpy()

    def __repr__(self) -> str:
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad})"


class Parameters:
    """The parameters by name. Iteration yields (name, parameter) in alphabetical order."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        self._state.parameter(name)  # raises for an unknown name or a parameter without value
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: Array) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return name in self._state.names

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in sorted(self._state.names):
            yield name, self[name]

    def __len__(self) -> int:
        return len(self._state.names)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(sorted(self._state.names))})"


class Properties:
    """The user's own values by name, saved in the checkpoint: int, float and str. A bool is stored as an int."""

    def __init__(self, values: dict[str, Property]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Property:
        if name not in self._values:
            raise UnknownNameError("Unknown property.", expected=", ".join(self._values), got=repr(name))
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a property must be str, not {type(name).__name__}")
        if isinstance(value, int | np.integer | np.bool_):
            self._values[name] = int(value)
        elif isinstance(value, float | np.floating):
            self._values[name] = float(value)
        elif isinstance(value, str):
            self._values[name] = value
        else:
            raise TypeError(f"the property {name!r} must be int, float or str, not {type(value).__name__}")

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        yield from sorted(self._values.items())

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({dict(self)!r})"


class CheckpointState:
    """The state of training, created by `load_checkpoint` and used by `Module` and `Optimizer`.

    Attributes:
        parameters: the model's parameters and buffers by name.
        properties: the user's own values by name.
        training_state: the internal state that the training API works on.
    """

    def __init__(self, content: Checkpoint) -> None:
        self.training_state = TrainingState(content)
        self.parameters = Parameters(self.training_state)
        self.properties = Properties(self.training_state.properties)

    @property
    def seed(self) -> int:
        """The seed of the random numbers of training. Assigning restarts them."""
        return self.training_state.seed

    @seed.setter
    def seed(self, value: int) -> None:
        self.training_state.seed = int(value)
        self.training_state.draws = 0

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Read a checkpoint of onnxtrain, or of onnxruntime-training 1.17 to 1.19.

        Raises:
            CheckpointError: the file is corrupt or not a checkpoint.
            OSError: it cannot be read.
        """
        return cls(checkpoint.load(checkpoint_uri))

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write the file atomically: if the process is killed, the old or the new file remains.

        With optimizer state, a resumed training equals the uninterrupted one bit for bit.

        Args:
            state: to save.
            checkpoint_uri: the file, in an existing folder.
            include_optimizer_state: whether moments, step, learning rate and accumulated gradients are saved too.

        Raises:
            TrainingError: the state is nominal and has no values yet.
            OSError: the file cannot be written.
        """
        content = state.training_state.content()
        checkpoint.save(content, checkpoint_uri, include_optimizer_state=include_optimizer_state)

    def __repr__(self) -> str:
        return f"CheckpointState({len(self.parameters)} parameters, {self.properties!r})"
