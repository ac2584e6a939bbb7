"""`onnxtrain artifacts model.onnx --train 'fc.*' -o out/`: generate the files to train a model on a device."""

from __future__ import annotations

import argparse
import fnmatch
import math
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
    """Add the command's arguments."""
    parser.add_argument("model", type=existing_file, help="an ONNX model from any exporter")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(), help="the folder for the files (default: current folder)"
    )
    parser.add_argument(
        "--loss", choices=_LOSSES, default="cross-entropy", help="the loss to add; none: the first output is the loss"
    )
    parser.add_argument(
        "--loss-input", action="append", metavar="NAME", help="the output that the loss is computed from"
    )
    parser.add_argument(
        "--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="with PyTorch's semantics"
    )
    parser.add_argument("--weight-decay", type=float, default=0.0, metavar="FACTOR", help="weight decay (default: 0)")
    parser.add_argument("--momentum", type=float, default=0.0, metavar="FACTOR", help="momentum of sgd (default: 0)")
    parser.add_argument("--clip-norm", type=float, metavar="NORM", help="clip gradients to this norm")
    parser.add_argument(
        "--train",
        action="append",
        metavar="PATTERN",
        help="parameters to train, with wildcards * and ?; repeatable (default: all floating-point parameters)",
    )
    parser.add_argument(
        "--freeze",
        action="append",
        metavar="PATTERN",
        help="parameters to store in the checkpoint without training them; repeatable",
    )
    parser.add_argument(
        "--also-output", action="append", metavar="NAME", help="an output to return besides the loss; repeatable"
    )
    parser.add_argument("--prefix", default="", help="prefix of the file names")
    parser.add_argument("--portable", action="store_true", help="use only operators that WebGPU runs too")
    parser.add_argument("--nominal", action="store_true", help="also write a checkpoint without values")
    parser.add_argument(
        "--qat", action="store_true", help="quantization-aware training: the model is quantized with Q/DQ nodes"
    )
    parser.add_argument("--learn-scales", action="store_true", help="with --qat: also train the scales")
    parser.add_argument(
        "--custom-ops", type=existing_file, metavar="LIBRARY", help="the shared library with the model's custom ops"
    )


def run(options: argparse.Namespace) -> int:
    """Write the artifacts and list the trained parameters."""
    model, floating = _model(options)
    frozen = _matching(floating, options.freeze or (), options.model)
    trained = [name for name in _matching(floating, options.train or ("*",), options.model) if name not in frozen]
    if floating and not trained:
        raise ArtifactError(
            "No parameter is chosen for training.",
            expected="--freeze that leaves some of --train",
            got="; ".join(options.freeze),
        )
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
    console.print(f"{len(trained)} trainable parameters, {count:,} elements: {', '.join(trained)}", markup=False)
    console.print(f"Wrote the artifacts to {options.output.resolve()}", markup=False)
    return 0


def _model(options: argparse.Namespace) -> tuple[Path | onnx.ModelProto, dict[str, int]]:
    """Return the model to generate artifacts from, and its trainable parameters with their element counts."""
    if options.learn_scales and not options.qat:
        raise OptionError("--learn-scales requires --qat.", todo="add --qat")
    if not options.qat:
        light, _ = hold_out(options.model)
        if not options.train and any(node.op_type == "DequantizeLinear" for node in light.graph.node):
            todo = "add --qat for quantization-aware training, or select floating-point parameters with --train"
            raise ArtifactError("The model is quantized: its weights are integers.", str(options.model), todo=todo)
        return options.model, _floating(light)
    quantized = fake_quantize(options.model, learn_scales=options.learn_scales)
    floating = _floating(hold_out(quantized.model)[0])
    return quantized.model, {name: floating.get(name, 1) for name in (*quantized.parameters, *quantized.scales)}


def _floating(light: onnx.ModelProto) -> dict[str, int]:
    """Return the element counts of the floating-point initializers that are not scalars."""
    counts: dict[str, int] = {}
    for tensor in light.graph.initializer:
        if tensor.data_type in (1, 10, 11, 16) and tensor.dims:  # float32, float16, float64, bfloat16
            counts[tensor.name] = math.prod(tensor.dims)
    return counts


def _matching(names: Mapping[str, int], patterns: Sequence[str], model: Path) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            first = ", ".join(list(names)[:30])
            todo = "use shell wildcards: 'fc*' matches fc1.weight and fc2.bias"
            raise OptionError("The pattern matches no parameter.", str(model), f"one of {first}", pattern, todo)
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def _optimizer(options: argparse.Namespace) -> AdamW | SGD | None:
    clip = None if options.clip_norm is None else ClipGradNorm(options.clip_norm)
    if options.optimizer == "adamw":
        return AdamW(eps=1e-8, weight_decay=options.weight_decay, clip_grad=clip, mode="torch")
    if options.optimizer == "sgd":
        return SGD(clip, momentum=options.momentum, weight_decay=options.weight_decay)
    return None
