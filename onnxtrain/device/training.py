"""The training API on stock onnxruntime: gradient step, evaluation, optimizer step, learning rate."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import onnxruntime as ort
from onnxruntime import OrtValue

from onnxtrain.device.checkpoint_state import CheckpointState
from onnxtrain.device.inference_export import export_for_inferencing
from onnxtrain.device.ort_training_files import convert_graph, convert_optimizer
from onnxtrain.device.sessions import Buffer, Device, Graph
from onnxtrain.device.values import Array, copied_to_ort, dtype_name, to_numpy
from onnxtrain.errors import TrainingError

Value: TypeAlias = "Array | OrtValue"


class Module:
    """Compute the loss and its gradients or, in eval mode, the loss only.

    Args:
        train_model_uri: the path of `training_model.onnx`.
        state: the checkpoint's state, whose parameters are used without a copy.
        eval_model_uri: the path of `eval_model.onnx`, for evaluation and export.
        device: `cpu`, `cuda` or `cuda:<index>`; parameters are moved there.
        session_options: for all sessions of this module and its optimizer. Prepacking is disabled in them, and they
            allocate from the arena that all training sessions share.

    Attributes:
        training: whether a call computes gradients.

    Raises:
        TrainingError: a graph cannot be loaded, or the device is not available.
        CheckpointError: the state does not belong to the graph.
    """

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: ort.SessionOptions | None = None,
    ) -> None:
        self.training = True
        self._device = Device.named(device)
        self._options = session_options or ort.SessionOptions()
        self._state = state.training_state
        self._train = self._load(train_model_uri, "training")
        self._eval = None if eval_model_uri is None else self._load(eval_model_uri, "eval")

    def __call__(self, *user_inputs: Value) -> Value | tuple[Value, ...]:
        """Run one step. In training mode, gradients accumulate until the next reset.

        Args:
            user_inputs: the inputs of the model and the loss, in the order of `input_names`, with exactly their dtypes;
                for a sequence a list of arrays, for an optional a value or None.

        Returns:
            The outputs in the order of `output_names`; a single one is not in a tuple. They are arrays, or OrtValues if
            all inputs are; a sequence is a list of arrays.

        Raises:
            TrainingError: the number, dtype or shape of inputs is wrong; there is no eval graph; the state is nominal
                and has no values.
        """
        graph = self._graph()
        self._state.require_values()
        feeds = dict(zip(graph.metadata.inputs, self._checked(user_inputs, graph), strict=True))
        graph.check(feeds)
        results = self._step(graph, feeds) if self.training else graph.run(feeds)
        if not all(isinstance(value, OrtValue) for value in user_inputs):
            results = [to_numpy(value) if isinstance(value, OrtValue) else value for value in results]
        return results[0] if len(results) == 1 else tuple(results)

    def train(self, mode: bool = True) -> Module:
        """Switch to training or, with `mode=False`, to evaluation."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Switch to evaluation: calls do not modify parameters, running statistics or gradients."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Reset the gradients at the next training call; until then they keep their values."""
        self._state.reset_due = True

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """Copy all parameters into one flat buffer, in the graph's order.

        Raises:
            TrainingError: the parameters have several dtypes, or the state is nominal and has no values.
        """
        arrays = [self._state.parameter(name).numpy() for name in self._names(trainable_only)]
        self._require_one_dtype(trainable_only)
        flat = np.concatenate([array.reshape(-1) for array in arrays]) if arrays else np.empty(0, np.float32)
        return copied_to_ort(flat)

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return the total number of elements of the parameters."""
        return sum(math.prod(self._shape(name)) for name in self._names(trainable_only))

    def copy_buffer_to_parameters(self, buffer: Value, trainable_only: bool = True) -> None:
        """Copy a flat buffer, such as the result of `get_contiguous_parameters`, to the parameters.

        A nominal state gets its values this way; the buffer must then hold all parameters.

        Raises:
            TrainingError: the length or dtype of the buffer is wrong, or a nominal state would be filled partially.
        """
        flat = to_numpy(buffer) if isinstance(buffer, OrtValue) else buffer
        names, size = self._names(trainable_only), self.get_parameters_size(trainable_only)
        dtype = self._require_one_dtype(trainable_only)
        if flat.shape != (size,) or dtype_name(flat) != dtype:
            message = "The buffer has the wrong length or dtype."
            raise TrainingError(message, None, f"{dtype} ({size},)", f"{dtype_name(flat)} {flat.shape}")
        if self._state.nominal and len(names) < len(self._names(trainable_only=False)):
            message = "A nominal state cannot be filled partially."
            raise TrainingError(message, "trainable_only=", False, True, "Pass all parameters in one buffer.")
        ends = np.cumsum([math.prod(self._shape(name)) for name in names])
        parts = np.split(flat, ends[:-1])
        self._state.fill({name: part.reshape(self._shape(name)) for name, part in zip(names, parts, strict=True)})

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Write an inference model: the eval graph up to the named values, with the parameters as initializers.

        Requires the package onnx-ir.

        Raises:
            TrainingError: there is no eval graph, or it has no value of such a name.
        """
        if self._eval is None:
            message = "The export for inference needs an eval graph."
            raise TrainingError(message, todo="Pass eval_model_uri to Module.")
        content = self._state.content()
        export_for_inferencing(self._eval.path, content.parameters, inference_model_uri, graph_output_names)

    def input_names(self) -> list[str]:
        """Return the names of the inputs of a call in the present mode, in order."""
        return list(self._graph().metadata.inputs)

    def output_names(self) -> list[str]:
        """Return the names of the outputs of a call in the present mode, in order."""
        return list(self._graph().outputs)

    def _load(self, path: str | os.PathLike[str], kind: str) -> Graph:
        convert = functools.partial(convert_graph, kind=kind, state=self._state)
        graph = Graph(path, kind, self._device, self._options, convert)
        graph.bind(self._state.join_graph(graph.metadata, graph.types, self._device))
        return graph

    def _graph(self) -> Graph:
        if self.training:
            return self._train
        if self._eval is None:
            raise TrainingError("There is no eval graph.", todo="Pass eval_model_uri to Module, or call train().")
        return self._eval

    def _checked(self, user_inputs: Sequence[Value], graph: Graph) -> Sequence[Value]:
        names = graph.metadata.inputs
        if len(user_inputs) != len(names):
            message = "The call has the wrong number of inputs."
            raise TrainingError(message, str(graph.path), ", ".join(names), f"{len(user_inputs)} inputs")
        for name, value in zip(names, user_inputs, strict=True):
            if graph.types[name].is_tensor and not isinstance(value, np.ndarray | np.generic | OrtValue):
                got = type(value).__name__
                raise TypeError(f"the input {name!r} must be a numpy array or an OrtValue, not {got}: use np.asarray")
        return [np.asarray(value) if isinstance(value, np.generic) else value for value in user_inputs]

    def _step(self, graph: Graph, feeds: dict[str, Value]) -> list[Value]:
        feeds["lazy_reset_grad"] = np.array([self._state.reset_due])
        if graph.metadata.draws:
            feeds["random_seed"] = np.array([self._state.seed + self._state.draws], np.int64)
        self._state.reset_due = True  # also if the run fails
        results = graph.run(feeds)
        self._state.reset_due = False
        self._state.draws += 1
        return results

    def _names(self, trainable_only: bool) -> tuple[str, ...]:
        return self._train.metadata.trainable if trainable_only else self._train.metadata.parameters

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._state.type_of(name)[1]

    def _require_one_dtype(self, trainable_only: bool) -> str:
        dtypes = {self._state.type_of(name)[0] for name in self._names(trainable_only)}
        if len(dtypes) > 1:
            message = "Parameters of several dtypes cannot be copied to or from one buffer."
            raise TrainingError(message, None, "one dtype", ", ".join(sorted(dtypes)), "Use state.parameters by name.")
        return dtypes.pop() if dtypes else "float32"


class Optimizer:
    """Update the parameters from their gradients.

    The learning rate is 1e-3 until it is set; a checkpoint with optimizer state has its own.

    Args:
        optimizer_uri: the path of `optimizer_model.onnx`.
        module: the module whose parameters are updated, on its device.

    Raises:
        TrainingError: the graph cannot be loaded.
        CheckpointError: the state in the checkpoint belongs to another optimizer, or the graph to another model.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._state = module._state
        convert = functools.partial(convert_optimizer, names=module._names(trainable_only=True), state=self._state)
        self._graph = Graph(optimizer_uri, "optimizer", module._device, module._options, convert)
        self._graph.bind(self._state.join_optimizer(self._graph.metadata, self._graph.types))
        # Bound once too: allocating two scalars takes longer than updating ten thousand parameters.
        self._rate, self._count = (Buffer(np.zeros(1, dtype), module._device) for dtype in (np.float32, np.int64))
        self._graph.bind({"learning_rate": self._rate, "step": self._count})

    @property
    def step_count(self) -> int:
        """The number of optimizer steps, including those before a checkpoint."""
        return self._state.step

    def step(self) -> None:
        """Run one optimizer step. The gradients keep their values until `Module.lazy_reset_grad`.

        Raises:
            TrainingError: the state is nominal and has no values.
        """
        self._state.require_values()
        self._rate.fill(np.array([self.get_learning_rate()], np.float32))
        self._count.fill(np.array([self._state.step], np.int64))
        self._graph.run({})
        self._state.step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next steps.

        Raises:
            TrainingError: it is not finite.
        """
        if not math.isfinite(learning_rate):
            raise TrainingError("The learning rate must be a finite number.", got=learning_rate)
        self._state.learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        rate = self._state.learning_rate
        assert rate is not None  # set by join_optimizer
        return rate


class LinearLRScheduler:
    """Linear warmup from 0, then linear decay to 0.

    At step t the learning rate is initial_lr · t / warmup during warmup, then
    initial_lr · (total − t) / (total − warmup), and 0 from `total` on. t is the optimizer's step count: resumed
    training continues the schedule.

    Args:
        optimizer: whose learning rate is set, by the constructor and by `step`.
        warmup_step_count: the number of warmup steps.
        total_step_count: the number of all steps, including warmup.
        initial_lr: the peak learning rate.

    Raises:
        TrainingError: a count is negative, or the warmup is longer than the total.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not 0 <= warmup_step_count <= total_step_count:
            expected = "0 <= warmup_step_count <= total_step_count"
            got = f"{warmup_step_count} and {total_step_count}"
            todo = "Pass them in the order of their names; onnxruntime-training had swapped them."
            raise TrainingError("The step counts of the scheduler are invalid.", None, expected, got, todo)
        self._optimizer = optimizer
        self._warmup = warmup_step_count
        self._total = total_step_count
        self._initial_lr = initial_lr
        self.step()

    def step(self) -> None:
        """Set the learning rate of the optimizer's next step."""
        self._optimizer.set_learning_rate(self._initial_lr * self._factor(self._optimizer.step_count))

    def _factor(self, step: int) -> float:
        if step < self._warmup:
            return step / self._warmup
        if step >= self._total:
            return 0.0
        return (self._total - step) / (self._total - self._warmup)
