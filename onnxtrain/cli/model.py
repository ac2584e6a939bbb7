"""Load the model that the argument MODEL names.

net.py:build            build() returns (module, inputs); inputs are a tensor, a tuple, or a dict of keyword arguments
path/to/folder          a folder with a Hugging Face config.json; the model is built with random weights
model.onnx              an ONNX model from any exporter; inputs are random, by the graph's types
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onnxtrain.capture.source_location import hide_own_frames
from onnxtrain.cli.argument_types import positive
from onnxtrain.device.onnx_module import OnnxModule
from onnxtrain.errors import OnnxTrainError, OptionError
from onnxtrain.observe.memory import tensors_in

FORMS = "file.py:function, a folder with a Hugging Face config.json, or a file.onnx"


@dataclass(frozen=True)
class LoadedModel:
    """A module and the arguments of its call."""

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> Any:
        """The inputs as one value: a dict of keyword arguments, or a tuple of positional ones."""
        return self.kwargs if self.kwargs and not self.args else self.args

    def __call__(self, module: torch.nn.Module | None = None) -> Any:
        """Call the module, or another one in its place, with the inputs."""
        return (module or self.module)(*self.args, **self.kwargs)


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments MODEL and the sizes of its inputs."""
    parser.add_argument("model", metavar="MODEL", help=FORMS)
    scope = "of the inputs generated for a folder or a file.onnx (default: %(default)s)"
    parser.add_argument("--batch", type=positive, default=4, metavar="ROWS", help=f"batch size {scope}")
    parser.add_argument("--length", type=positive, default=64, metavar="TOKENS", help=f"sequence length {scope}")


def model_of(options: argparse.Namespace) -> LoadedModel:
    """Load the model that the command line names, and run it once in eager PyTorch, so that its own errors show there.

    Raises:
        OptionError: there is no such model, or it does not accept its inputs.
    """
    loaded = load_model(options.model, batch=options.batch, length=options.length)
    try:
        with torch.no_grad():
            loaded()
    except OnnxTrainError:
        raise
    except Exception as error:
        if hide_own_frames(error):
            raise
        got = f"{type(error).__name__}: {error}"
        raise _load_error(loaded.name, "a module that accepts its inputs", got, "run it in PyTorch first") from error
    return loaded


def load_model(text: str, *, batch: int = 4, length: int = 64) -> LoadedModel:
    """Load what MODEL names, in training mode.

    Args:
        text: see the docstring of this file.
        batch: the batch size of the inputs generated for a folder or an ONNX file.
        length: their sequence length, and the size of the other dynamic dimensions of an ONNX file.

    Raises:
        OptionError: there is no such file, function, class or input.
        ArtifactError: the ONNX model contains an op that a training graph does not support.
    """
    path, separator, function = text.rpartition(":")
    if separator and path.endswith(".py"):
        return _from_function(Path(path), function)
    if Path(text).is_dir():
        return _from_folder(Path(text), batch, length)
    if text.endswith(".onnx") and Path(text).is_file():
        module = OnnxModule.load(Path(text))
        return LoadedModel(Path(text).stem, module.train(), module.example(batch, length))
    got = "something else" if Path(path or text).exists() else "no such file or folder"
    raise _load_error(text, FORMS, got, "check the path")


def _load_error(text: str, expected: object, got: object, todo: str) -> OptionError:
    return OptionError("MODEL cannot be loaded.", where=text, expected=expected, got=got, todo=todo)


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's own loss if its output has one, else the sum of the means of the differentiable outputs.

    Raises:
        OptionError: no output requires a gradient.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.dim() == 0:
        return own
    means = [tensor.float().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not means:
        raise OptionError(
            "No output of MODEL requires a gradient.",
            expected="a tensor with requires_grad=True",
            got=type(output).__name__,
            todo="return a loss",
        )
    return torch.stack(means).sum()


# A function of a Python file


def _from_function(path: Path, function: str) -> LoadedModel:
    where = f"{path}:{function}"
    if not path.is_file():
        raise _load_error(where, FORMS, "no such file", "check the path")
    builder = getattr(_module_of(path), function, None)
    if not callable(builder):
        raise _load_error(where, "the name of a function in the file", f"no function {function!r}", "check the name")
    try:
        inspect.signature(builder).bind()
    except TypeError as error:
        raise _load_error(
            where, "a function without required arguments", error, "give its arguments default values"
        ) from error
    result = builder()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.nn.Module)):
        raise _load_error(where, "(module, inputs)", _described(result), "return the module and its inputs")
    module, inputs = result
    if isinstance(inputs, Mapping):
        return LoadedModel(function, module, (), dict(inputs))
    return LoadedModel(function, module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _module_of(path: Path) -> Any:
    """Import the file as a module. It can import files beside it, as a script can."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# A folder with a Hugging Face config


def _from_folder(folder: Path, batch: int, length: int) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise _load_error(str(folder), "a config.json in the folder", "none", "give the folder of a saved model")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise _load_error(str(folder), "the package transformers", error, "pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(
            str(folder), "a Hugging Face config.json", str(error).partition("\n")[0], "check the file"
        ) from error
    names: list[str] = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        expected = "a class of transformers under `architectures`"
        raise _load_error(str(folder / "config.json"), expected, names or "nothing", "name the model's class there")
    # A key-value cache is for generation only.
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # The start token of a decoder is often missing in handwritten configs.
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    module = model_class(config).train()
    return LoadedModel(names[0], module, (), _inputs(module, config, batch, length))


def _inputs(module: torch.nn.Module, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Generate inputs for the class: tokens or pixels, with labels if it has a loss."""
    class_name = type(module).__name__
    if getattr(module, "main_input_name", "input_ids") == "pixel_values":
        size, channels = config.image_size, config.num_channels
        sides = [size, size] if isinstance(size, int) else list(size)
        inputs: dict[str, Any] = {"pixel_values": torch.randn(batch, channels, *sides)}
    else:
        text = config.get_text_config()
        length = min(length, getattr(text, "max_position_embeddings", length))
        tokens = torch.randint(0, text.vocab_size, (batch, length))
        # Sequences of different lengths, as in real text.
        lengths = torch.linspace(length, (length + 1) // 2, batch).long()
        mask = (torch.arange(length) < lengths[:, None]).long()
        inputs = {"input_ids": tokens, "attention_mask": mask}
    for suffix, labels in _LABELS.items():
        if class_name.endswith(suffix):
            inputs |= labels(inputs, config)
    if "labels" not in inputs and "decoder_input_ids" in inspect.signature(module.forward).parameters:
        inputs["decoder_input_ids"] = next(iter(inputs.values()))
    return inputs


def _token_labels(inputs: Mapping[str, torch.Tensor], _config: Any) -> dict[str, torch.Tensor]:
    return {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def _masked_labels(inputs: Mapping[str, torch.Tensor], _config: Any) -> dict[str, torch.Tensor]:
    """Return one token in seven, close to BERT's 15 %, and no padding."""
    tokens = inputs["input_ids"]
    picked = (torch.arange(tokens.numel()).view_as(tokens) % 7 == 0) & inputs["attention_mask"].bool()
    return {"labels": tokens.masked_fill(~picked, -100)}


def _class_labels(inputs: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    rows = next(iter(inputs.values())).size(0)
    return {"labels": torch.arange(rows) % config.num_labels}


def _tag_labels(inputs: Mapping[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    return {"labels": inputs["input_ids"] % config.num_labels}


def _span_labels(inputs: Mapping[str, torch.Tensor], _config: Any) -> dict[str, torch.Tensor]:
    start = torch.zeros(inputs["input_ids"].size(0), dtype=torch.int64)
    return {"start_positions": start, "end_positions": start + 1}


# Labels by the suffix of the class name, by which transformers names a model's head.
_LABELS: Mapping[str, Callable[[Mapping[str, torch.Tensor], Any], dict[str, torch.Tensor]]] = {
    "ForMaskedLM": _masked_labels,
    "ForCausalLM": _token_labels,
    "LMHeadModel": _token_labels,
    "ForConditionalGeneration": _token_labels,
    "ForSequenceClassification": _class_labels,
    "ForImageClassification": _class_labels,
    "ForTokenClassification": _tag_labels,
    "ForQuestionAnswering": _span_labels,
}
