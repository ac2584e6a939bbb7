"""generate_artifacts: write the files that train a model on a device."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxtrain import onnx_file
from onnxtrain.device import checkpoint, losses, optimizers
from onnxtrain.device.block import Base, Block, empty_base, extending, names_of
from onnxtrain.device.block import custom_op_library as in_library
from onnxtrain.device.blocks import PassThrough
from onnxtrain.device.checkpoint_data import Checkpoint
from onnxtrain.device.light_model import hold_out
from onnxtrain.device.qat import with_fake_quant
from onnxtrain.device.training_block import ForwardWithLoss, ParameterChoice, TrainingBlock
from onnxtrain.errors import ArtifactError
from onnxtrain.graph.values import TensorType
from onnxtrain.log import LOG, warn

_MAX_BYTES = 2**31  # of a protobuf message
_FLOATING = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)


class LossType(enum.IntEnum):
    """The losses that `generate_artifacts` takes by name."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(enum.IntEnum):
    """The optimizers that `generate_artifacts` takes by name, with onnxruntime-training's defaults."""

    AdamW = 1
    SGD = 2


_LOSSES: Mapping[LossType, type[Block]] = {
    LossType.MSELoss: losses.MSELoss,
    LossType.CrossEntropyLoss: losses.CrossEntropyLoss,
    LossType.BCEWithLogitsLoss: losses.BCEWithLogitsLoss,
    LossType.L1Loss: losses.L1Loss,
}
_OPTIMIZERS: Mapping[OptimType, type[optimizers.AdamW | optimizers.SGD]] = {
    OptimType.AdamW: optimizers.AdamW,
    OptimType.SGD: optimizers.SGD,
}


def generate_artifacts(
    model: onnx.ModelProto | ir.Model | str | os.PathLike[str] | Any,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | Block | None = None,
    optimizer: OptimType | Block | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: list[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: list[str] | None = None,
    *,
    portable: bool = False,
    example_args: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    output_names: Sequence[str] | None = None,
) -> None:
    """Write the files that train a model on any stock onnxruntime; docs/how-to/on-device-training.md describes them.

    Args:
        model: an ONNX model of any exporter, its path (required above 2 GB), or a torch module. Pairs of QuantizeLinear
            and DequantizeLinear become FakeQuant nodes (`fake_quantize`).
        requires_grad: the names of the parameters to train. None with a torch module: those with requires_grad.
        frozen_params: the names of parameters that are not trained but are part of the checkpoint. All others are
            constants of the graphs. None with a torch module: those without requires_grad.
        loss: a `LossType`, or a block that appends the loss; None: the model's first output is the loss.
        optimizer: an `OptimType`, a block of `onnxblock.optim`, or one that calls such a block; None: none is written.
        artifact_directory: the folder of the files, created if it does not exist; None: the current folder.
        prefix: the prefix of all file names.
        ort_format: not supported; the error explains how to convert the files with the device's onnxruntime.
        custom_op_library: the shared library of the model's custom ops.
        additional_output_names: outputs of the model that the graphs return besides the loss.
        nominal_checkpoint: whether to also write `<prefix>nominal_checkpoint`, with names and shapes only.
        loss_input_names: the values that `loss` is called with; None: all outputs of the model.
        portable: whether the graphs are restricted to ops and dtypes that also run on WebGPU.
        example_args: the positional arguments of an example call of a torch module.
        example_kwargs: its keyword arguments.
        output_names: the names of the tensors that it returns.

    Raises:
        ArtifactError: a RuntimeError; the model or an argument cannot be used.
        TypeError: `optimizer` is neither an OptimType nor a block.
    """
    block = _loss_block(loss)
    step = _optimizer(optimizer)
    _check_arguments(requires_grad, frozen_params, additional_output_names, ort_format)
    sources = _Sources(model, example_args, example_kwargs or {}, output_names)
    choice = sources.choice(requires_grad, frozen_params)
    with contextlib.nullcontext() if custom_op_library is None else in_library(custom_op_library):
        training, evaluation = (
            _extended(base, block, loss is not None, additional_output_names or [], loss_input_names)
            for base in (sources.training, sources.evaluation)
        )
    graphs = _graphs(training, evaluation, choice, step, portable=portable)
    folder = Path.cwd() if artifact_directory is None else Path(artifact_directory)
    _write(graphs, folder, prefix)
    for name in ("checkpoint", "nominal_checkpoint")[: 1 + nominal_checkpoint]:
        _write_checkpoint(training, choice, folder / f"{prefix}{name}", nominal=name != "checkpoint")


def _graphs(
    training: ForwardWithLoss,
    evaluation: ForwardWithLoss,
    choice: ParameterChoice,
    step: Block | None,
    *,
    portable: bool,
) -> dict[str, ir.Model]:
    """Build the graphs, by file name."""
    if not choice.trainable:
        warn("the model has nothing to train: only the evaluation model is written")
        return {"eval_model": evaluation.evaluation(choice, portable=portable)}
    graphs = {
        "training_model": training.training(choice, portable=portable),
        "eval_model": evaluation.evaluation(choice, portable=portable),
    }
    if step is not None:
        graphs["optimizer_model"] = _optimizer_graph(step, training, choice, portable=portable)
    return graphs


def _optimizer_graph(step: Block, training: ForwardWithLoss, choice: ParameterChoice, *, portable: bool) -> ir.Model:
    """Build the graph of an optimizer, which has an input for each tensor; or have a block of the user build it."""
    tensors, (trainable, frozen, _) = training.parameters(), training.ordered(choice)
    if isinstance(step, optimizers.Optimizer):
        return step.model([(name, _type(tensors[name])) for name in trainable], portable=portable)
    if portable:
        raise ArtifactError(
            "An optimizer block of your own is not portable.", expected="an OptimType or a block of onnxblock.optim",
            got=type(step).__name__,
        )  # fmt: skip
    with empty_base() as base:
        step(tuple([_proto(name, tensors[name]) for name in names] for names in (trainable, frozen)))
        return ir.from_proto(base)


def _proto(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    proto = ir.to_proto(tensor)
    proto.name = name
    return proto


def _warn_of_bfloat16(graphs: Iterable[ir.Model]) -> None:
    """Name the ops that compute in bfloat16, of which onnxruntime has hardly any on a CPU."""
    nodes = [node for model in graphs for node in model.graph]
    names = {node.op_type for node in nodes if any(v.dtype == ir.DataType.BFLOAT16 for v in node.outputs)}
    if names - {"Cast", "Identity", "Constant"}:
        ops = ", ".join(sorted(names))
        warn(
            f"the graphs compute in bfloat16, which onnxruntime's CPU provider lacks for most ops ({ops}): train them "
            "on a GPU, or export the model in float32"
        )


def _type(tensor: ir.TensorProtocol) -> TensorType:
    return TensorType(tensor.dtype, tuple(int(size) for size in tensor.shape.numpy()))


def _write(graphs: Mapping[str, ir.Model], folder: Path, prefix: str) -> None:
    _warn_of_bfloat16(graphs.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        todo = "pass a folder that can be written to"
        raise ArtifactError(
            "The folder for the artifacts cannot be created.", str(folder), got=error, todo=todo
        ) from error
    for name, graph in graphs.items():
        path = folder / f"{prefix}{name}.onnx"
        onnx_file.write_file_model(graph, path)
        LOG.info("wrote %s", path)


def _write_checkpoint(training: ForwardWithLoss, choice: ParameterChoice, path: Path, *, nominal: bool) -> None:
    tensors = training.parameters()
    trainable, frozen, buffers = training.ordered(choice)
    arrays = {name: tensors[name].numpy() for name in (*trainable, *frozen, *buffers)}
    checkpoint.save(Checkpoint(arrays, frozenset(trainable), nominal=nominal), path)


# Arguments


def _loss_block(loss: object) -> Block:
    if loss is None:
        LOG.info("no loss given: using the model's first output as the loss")
        return PassThrough()
    if isinstance(loss, Block):
        return loss
    if isinstance(loss, LossType):
        return _LOSSES[loss]()
    raise ArtifactError("Unknown loss.", expected="a LossType or an onnxblock.Block", got=type(loss).__name__)


def _optimizer(optimizer: object) -> Block | None:
    if optimizer is None or isinstance(optimizer, Block):
        return optimizer
    if isinstance(optimizer, OptimType):
        return _OPTIMIZERS[optimizer]()
    raise TypeError(f"Unknown optimizer: expected an OptimType or an onnxblock.Block, got {type(optimizer).__name__}.")


def _check_arguments(
    requires_grad: Sequence[str] | None, frozen_params: Sequence[str] | None, additional: object, ort_format: bool
) -> None:
    in_both = set(requires_grad or ()) & set(frozen_params or ())
    if in_both:
        raise ArtifactError("A parameter cannot be both trained and frozen.", got=", ".join(sorted(in_both)))
    if additional is not None and not isinstance(additional, list):
        raise ArtifactError("additional_output_names must be a list of names.", got=type(additional).__name__)
    if ort_format:
        todo = "python -m onnxruntime.tools.convert_onnx_models_to_ort <folder>, on the device's own onnxruntime"
        raise ArtifactError(
            "ORT-format files work with one version of onnxruntime only, which must write them.", todo=todo
        )


class _Sources:
    """The forward graphs for training and evaluation, and the trainable parameters of a torch module."""

    def __init__(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output_names: Sequence[str] | None
    ) -> None:
        self._trainable: Sequence[str] | None = None
        self._frozen: Sequence[str] | None = None
        if isinstance(model, onnx.ModelProto):
            _refuse_large(model)
        if isinstance(model, onnx.ModelProto | ir.Model | str | os.PathLike):
            model = with_fake_quant(model)
            self.training = Base(*hold_out(model))
            self.evaluation = Base(onnx.ModelProto(), self.training.tensors)
            self.evaluation.model.CopyFrom(self.training.model)
            return
        self._capture(model, args, kwargs, output_names)

    def _capture(
        self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output_names: Sequence[str] | None
    ) -> None:
        import torch  # noqa: PLC0415  artifacts of an ONNX model need no module

        from onnxtrain.device.from_torch import from_torch  # noqa: PLC0415  as above

        if not isinstance(model, torch.nn.Module):
            expected = "an onnx.ModelProto, the path of a model, or a torch.nn.Module"
            raise ArtifactError("Unknown kind of model.", expected=expected, got=type(model).__name__)
        if not args and not kwargs:
            raise ArtifactError(
                "A torch.nn.Module needs example arguments to be captured.", expected="example_args=(...)"
            )
        captured = from_torch(model, args, kwargs, output_names)
        self.training, self.evaluation = captured.training, captured.evaluation
        self._trainable, self._frozen = captured.trainable, captured.frozen

    def choice(self, requires_grad: Sequence[str] | None, frozen: Sequence[str] | None) -> ParameterChoice:
        """Return the parameters to train and to freeze; none to train if the model has none besides the frozen ones."""
        if requires_grad is None:
            requires_grad = [name for name in self._trainable or () if name not in (frozen or ())]
        if frozen is None:
            parameters = [*(self._trainable or ()), *(self._frozen or ())]
            frozen = [name for name in parameters if name not in requires_grad]
        if not requires_grad and self._candidates(frozen):
            names = self._candidates(())
            listed = f"{', '.join(names[:30])}{', …' if len(names) > 30 else ''}"
            raise ArtifactError(
                "No parameter is chosen for training.",
                expected=f"requires_grad=[...] with some of {listed}",
                got="none",
            )
        return ParameterChoice(list(requires_grad), list(frozen))

    def _candidates(self, frozen: Sequence[str]) -> list[str]:
        """Return the floating-point initializers, besides those and running statistics."""
        graph = self.training.model.graph
        statistics = {name for n in graph.node if n.op_type == "BatchNormalization" for name in n.input[3:5]}
        names = [t.name for t in graph.initializer if t.data_type in _FLOATING and t.dims]
        return [name for name in names if name not in frozen and name not in statistics]


def _refuse_large(model: onnx.ModelProto) -> None:
    try:
        size = model.ByteSize()
    except Exception:  # noqa: BLE001  protobuf has its own error for messages that are too large
        size = _MAX_BYTES
    if size >= _MAX_BYTES:
        todo = "save it with external data (onnx.save(..., save_as_external_data=True)) and give the path"
        raise ArtifactError(
            "A model of 2 GB or more does not fit into a protobuf message.", got=f"{size} bytes", todo=todo
        )


class _WithLoss(TrainingBlock):
    """The loss, then the additional outputs."""

    def __init__(self, loss: Block, additional: Sequence[str]) -> None:
        super().__init__()
        self._loss = loss
        self._additional = additional

    def build(self, *names: str) -> list[str]:
        return [*names_of(self._loss(*names)), *self._additional]


def _extended(
    base: Base, loss: Block, has_loss: bool, additional: Sequence[str], loss_inputs: Sequence[str] | None
) -> ForwardWithLoss:
    outputs = [v.name for v in base.model.graph.output]
    if loss_inputs is None:
        if type(loss) in _LOSSES.values() and len(outputs) > 1:
            raise ArtifactError(
                f"The loss takes one output, but the model has {len(outputs)}.",
                got=", ".join(outputs),
                todo="name it: loss_input_names=[...]",
            )
        loss_inputs = outputs if has_loss else outputs[:1]
    unknown = [name for name in additional if name not in outputs]
    if unknown:
        raise ArtifactError("The model has no such outputs.", expected=", ".join(outputs), got=", ".join(unknown))
    with extending(base):
        block = _WithLoss(loss, additional)
        block(*loss_inputs)
    return block.extended
