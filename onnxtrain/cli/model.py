"""MODEL, the argument that names a model: a function of a file, a folder with a Hugging Face config, a file of ONNX.

net.py:build            build() gives (module, inputs); inputs are a tensor, a tuple, or a dict of keyword arguments
path/to/folder          its config.json names the class; built with random weights
model.onnx              any exporter's; inputs are drawn from the graph's types
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

from onnxtrain.capture.source_line import hide_own_frames
from onnxtrain.cli.argument_types import positive
from onnxtrain.device.onnx_module import OnnxModule
from onnxtrain.errors import OnnxTrainError, OptionError
from onnxtrain.observe.memory import tensors_in

FORMS = "file.py:function, a folder with a Hugging Face config.json, or a file.onnx"


@dataclass(frozen=True)
class LoadedModel:
    """A module and what to call it with."""

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch(self) -> Any:
        """The inputs as one value: a dict of keyword arguments, or a tuple of positional ones."""
        return self.kwargs if self.kwargs and not self.args else self.args

    def __call__(self, module: torch.nn.Module | None = None) -> Any:
        """Runs the module, or another in its place, on the inputs."""
        return (module or self.module)(*self.args, **self.kwargs)


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds MODEL and the sizes of its inputs."""
    parser.add_argument("model", metavar="MODEL", help=FORMS)
    where = "of the inputs that are made for a folder or a file.onnx (default: %(default)s)"
    parser.add_argument("--batch", type=positive, default=4, metavar="ROWS", help=f"rows {where}")
    parser.add_argument("--length", type=positive, default=64, metavar="TOKENS", help=f"tokens a row {where}")


def model_of(options: argparse.Namespace) -> LoadedModel:
    """The model that the command line names, after one run in PyTorch: what it raises there is its own error.

    Raises:
        OptionError: there is no such model, or it does not take its inputs.
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
        raise _refusal(loaded.name, "a module that takes its inputs", got, "run it in PyTorch first") from error
    return loaded


def load_model(text: str, *, batch: int = 4, length: int = 64) -> LoadedModel:
    """Loads what MODEL names, in training mode.

    Args:
        text: see the module.
        batch: rows of the inputs that are made for a folder or a file of ONNX.
        length: their tokens, and the size of other open dimensions of a file of ONNX.

    Raises:
        OptionError: there is no such file, function, class or input.
        ArtifactError: the ONNX model holds what a training graph cannot.
    """
    path, separator, function = text.rpartition(":")
    if separator and path.endswith(".py"):
        return _of_function(Path(path), function)
    if Path(text).is_dir():
        return _of_folder(Path(text), batch, length)
    if text.endswith(".onnx") and Path(text).is_file():
        module = OnnxModule.load(Path(text))
        return LoadedModel(Path(text).stem, module.train(), module.example(batch, length))
    there = "there is no such file or folder" if not Path(path or text).exists() else "it is none of these"
    raise _refusal(text, FORMS, there, "check the path")


def _refusal(text: str, expected: object, got: object, todo: str) -> OptionError:
    return OptionError("MODEL cannot be loaded.", where=text, expected=expected, got=got, todo=todo)


def loss_of(output: Any) -> torch.Tensor:
    """A loss to train with: the model's own where its output has one, else the mean of what has a gradient.

    Raises:
        OptionError: nothing in the output has a gradient.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.dim() == 0:
        return own
    means = [tensor.float().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not means:
        got = type(output).__name__
        raise OptionError("MODEL gives nothing that has a gradient.", got=got, todo="return a loss, or what has one")
    return torch.stack(means).sum()


# A function of a Python file


def _of_function(path: Path, function: str) -> LoadedModel:
    where = f"{path}:{function}"
    if not path.is_file():
        raise _refusal(where, FORMS, "there is no such file", "check the path")
    builder = getattr(_module_of(path), function, None)
    if not callable(builder):
        raise _refusal(where, "a function of the file", f"the file has no function {function!r}", "check the name")
    try:
        inspect.signature(builder).bind()
    except TypeError as error:
        raise _refusal(where, "a function without arguments", error, "give its arguments defaults") from error
    made = builder()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise _refusal(where, "(module, inputs)", _described(made), "return the module and its inputs")
    module, inputs = made
    if isinstance(inputs, Mapping):
        return LoadedModel(function, module, (), dict(inputs))
    return LoadedModel(function, module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,))


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
    return f"a {type(value).__name__}"


def _module_of(path: Path) -> Any:
    """The file as a module; files beside it can be imported, as where Python runs it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


# A folder with a Hugging Face config


def _of_folder(folder: Path, batch: int, length: int) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise _refusal(str(folder), "config.json in the folder", "none", "give the folder of a saved model")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise _refusal(str(folder), "the package transformers", error, "pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise _refusal(
            str(folder), "a Hugging Face config.json", str(error).partition("\n")[0], "check the file"
        ) from error
    names: list[str] = getattr(config, "architectures", None) or []
    kind = getattr(transformers, names[0], None) if names else None
    if kind is None:
        expected = "a class of transformers under `architectures`"
        raise _refusal(str(folder / "config.json"), expected, names or "nothing", "name the model's class there")
    # A cache of keys and values is for generating.
    if hasattr(config, "use_cache"):
        config.use_cache = False
    # What a decoder begins with: a config that was made by hand often names none.
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    module = kind(config).train()
    return LoadedModel(names[0], module, (), _inputs(module, config, batch, length))


def _inputs(module: torch.nn.Module, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Inputs of the kind that the class takes: tokens or pixels, with labels where it has a loss."""
    kind = type(module).__name__
    if getattr(module, "main_input_name", "input_ids") == "pixel_values":
        size, channels = config.image_size, config.num_channels
        sides = [size, size] if isinstance(size, int) else list(size)
        found: dict[str, Any] = {"pixel_values": torch.randn(batch, channels, *sides)}
    else:
        text = config.get_text_config()
        length = min(length, getattr(text, "max_position_embeddings", length))
        tokens = torch.randint(0, text.vocab_size, (batch, length))
        # Rows of different lengths, as real text has them.
        ends = torch.linspace(length, (length + 1) // 2, batch).long()
        mask = (torch.arange(length) < ends[:, None]).long()
        found = {"input_ids": tokens, "attention_mask": mask}
    for ending, labels in _LABELS.items():
        if kind.endswith(ending):
            found |= labels(found, config)
    if "labels" not in found and "decoder_input_ids" in inspect.signature(module.forward).parameters:
        found["decoder_input_ids"] = next(iter(found.values()))
    return found


def _token_labels(inputs: Mapping[str, torch.Tensor], _config: Any) -> dict[str, torch.Tensor]:
    return {"labels": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)}


def _masked_labels(inputs: Mapping[str, torch.Tensor], _config: Any) -> dict[str, torch.Tensor]:
    """One token in seven, as in BERT's training (15 %), and none of the padding."""
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


# Labels by the ending of the class's name, as transformers names its heads.
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
