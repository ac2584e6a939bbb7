"""`onnxtrain artifacts model.onnx --train 'fc.*' -o out/`: what trains a model on a device."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from rich.console import Console

from onnxtrain.artifacts import LossType, fake_quantize, generate_artifacts
from onnxtrain.cli.argument_types import existing_file
from onnxtrain.device.light_model import hold_out
from onnxtrain.errors import ArtifactError, OptionError
from onnxtrain.onnxblock.optim import SGD, AdamW, ClipGradNorm

_LOSSES: Mapping[str, LossType | None] = {
    "cross-entropy": LossType.CrossEntropyLoss,
    "mse": LossType.MSELoss,
    "bce": LossType.BCEWithLogitsLoss,
    "l1": LossType.L1Loss,
    "none": None,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model", type=existing_file, help="an ONNX model of any exporter")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), help="the folder for the files (default: this one)"
    )
    parser.add_argument("--loss", choices=_LOSSES, default="cross-entropy", help="none: the first output is the loss")
    parser.add_argument(
        "--loss-input", action="append", metavar="NAME", help="the output that the loss is computed from"
    )
    parser.add_argument("--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="as PyTorch has them")
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="SHARE")
    parser.add_argument("--momentum", type=float, default=0.0, metavar="SHARE", help="of sgd")
    parser.add_argument("--clip-norm", type=float, metavar="NORM", help="clip the gradients to this norm")
    parser.add_argument(
        "--train",
        action="append",
        metavar="PATTERN",
        help="parameters to train, with * and ?; may be given several times (default: all that are floating)",
    )
    parser.add_argument(
        "--freeze", action="append", metavar="PATTERN", help="parameters to keep in the checkpoint only"
    )
    parser.add_argument("--also-output", action="append", metavar="NAME", help="outputs to give besides the loss")
    parser.add_argument("--prefix", default="", help="of the files' names")
    parser.add_argument("--portable", action="store_true", help="keep to what also runs on WebGPU")
    parser.add_argument("--nominal", action="store_true", help="write a checkpoint without values too")
    parser.add_argument("--qat", action="store_true", help="the model is quantized (Q/DQ): train with its rounding")
    parser.add_argument("--learn-scales", action="store_true", help="with --qat: train the scales too")
    parser.add_argument(
        "--custom-ops", type=existing_file, metavar="LIBRARY", help="the library of the model's custom ops"
    )


def run(options: argparse.Namespace) -> int:
    """Writes the artifacts and lists what is trained."""
    model, floating = _model(options)
    frozen = _matching(floating, options.freeze or (), options.model)
    trained = [name for name in _matching(floating, options.train or ("*",), options.model) if name not in frozen]
    generate_artifacts(
        model,
        requires_grad=trained,
        frozen_params=frozen,
        loss=_LOSSES[options.loss],
        optimizer=_optimizer(options),
        artifact_directory=options.output,
        prefix=options.prefix,
        custom_op_library=options.custom_ops,
        additional_output_names=options.also_output,
        nominal_checkpoint=options.nominal,
        loss_input_names=options.loss_input,
        portable=options.portable,
    )
    count = sum(floating[name] for name in trained)
    console = Console(soft_wrap=True)
    console.print(f"{count:,} numbers in {len(trained)} parameters are trained: {', '.join(trained)}", markup=False)
    console.print(f"Wrote the artifacts to {options.output.resolve()}", markup=False)
    return 0


def _model(options: argparse.Namespace) -> tuple[Path | onnx.ModelProto, dict[str, int]]:
    """The model to make artifacts of, and what can be trained of it."""
    if options.learn_scales and not options.qat:
        raise OptionError("Only a quantized model has scales to learn.", "--learn-scales", todo="give --qat too")
    if not options.qat:
        light, _ = hold_out(options.model)
        if not options.train and any(node.op_type == "DequantizeLinear" for node in light.graph.node):
            todo = "give --qat to train with its rounding, or name by --train what shall be trained as it is"
            raise ArtifactError("The model is quantized: its weights are integers.", str(options.model), todo=todo)
        return options.model, _floating(light)
    quantized = fake_quantize(options.model, learn_scales=options.learn_scales)
    floating = _floating(hold_out(quantized.model)[0])
    return quantized.model, {name: floating.get(name, 1) for name in (*quantized.parameters, *quantized.scales)}


def _floating(light: onnx.ModelProto) -> dict[str, int]:
    """The floating initializers that have a dimension, with how many elements they have."""
    found: dict[str, int] = {}
    for tensor in light.graph.initializer:
        if tensor.data_type in (1, 10, 11, 16) and tensor.dims:  # float32, float16, float64, bfloat16
            count = 1
            for size in tensor.dims:
                count *= size
            found[tensor.name] = count
    return found


def _matching(names: Mapping[str, int], patterns: Sequence[str], model: Path) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(list(names)[:30])
            todo = "write it as in a shell: * stands for any characters, so 'fc*' takes fc1.weight and fc2.bias"
            raise OptionError("No parameter has a name like this.", str(model), f"some of {shown}", pattern, todo)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _optimizer(options: argparse.Namespace) -> AdamW | SGD | None:
    clip = None if options.clip_norm is None else ClipGradNorm(options.clip_norm)
    if options.optimizer == "adamw":
        return AdamW(eps=1e-8, weight_decay=options.weight_decay, clip_grad=clip, mode="torch")
    if options.optimizer == "sgd":
        return SGD(clip, momentum=options.momentum, weight_decay=options.weight_decay)
    return None
