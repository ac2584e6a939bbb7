"""`onnxtrain train out/ --data digits`: trains artifacts on a data set, for a first try without code."""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from onnxtrain.api import CheckpointState, Module, Optimizer
from onnxtrain.cli.argument_types import existing_file, existing_folder, positive
from onnxtrain.device.sessions import METADATA, Device, open_session
from onnxtrain.device.values import Array, numpy_name
from onnxtrain.errors import OptionError, TrainingError

_DIGITS = "digits"
_PIXELS = 64
_ADVICE = "give an .npz file with an array for each input, or make artifacts of a model that takes these"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("folder", type=existing_folder, help="the folder of the artifacts")
    parser.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="'digits', or an .npz file with an array for each input",
    )
    parser.add_argument("--epochs", type=positive, metavar="N", default=20, help="passes over the data (default: 20)")
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="samples in an update (default: 32)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="RATE", help="default: 0.001")
    parser.add_argument("--test-share", type=float, default=0.2, metavar="SHARE", help="kept to test with (0.2)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the samples and of dropout")
    parser.add_argument("--resume", action="store_true", help="go on from what this command saved")
    parser.add_argument("--prefix", default="", help="of the files' names")
    parser.add_argument(
        "--quantized",
        type=existing_file,
        metavar="MODEL",
        help="of artifacts --qat: write it with the trained values too",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<number>")


def run(options: argparse.Namespace) -> int:
    """Trains, and writes the checkpoint and the model for inference beside the artifacts."""
    _check(options)
    console = Console(soft_wrap=True)
    files = _files(options.folder, options.prefix)
    start = files["trained_checkpoint" if options.resume else "checkpoint"]
    if not start.is_file():
        raise TrainingError(f"{start.name} is not there.", str(start), todo="leave out --resume")
    state = CheckpointState.load_checkpoint(start)
    if not options.resume:
        state.seed = options.seed
    evaluation = _Evaluation(files["eval_model.onnx"], state)
    data = _data(options.data, evaluation.types)
    training, test = _split(data, options.test_share, options.seed)
    module = Module(files["training_model.onnx"], state, files["eval_model.onnx"], device=options.device)
    optimizer = Optimizer(files["optimizer_model.onnx"], module)
    optimizer.set_learning_rate(options.learning_rate)
    size = evaluation.batch_size or options.batch_size
    loss, accuracy = _train(module, optimizer, evaluation, training, test, size, options, console)
    CheckpointState.save_checkpoint(state, files["trained_checkpoint"], include_optimizer_state=True)
    module.export_model_for_inferencing(files["inference.onnx"], evaluation.outputs)
    written = ["trained_checkpoint", "inference.onnx"]
    if options.quantized is not None:
        _write_quantized(options.quantized, state, files["quantized.onnx"])
        written.append("quantized.onnx")
    shown = f"test loss {loss:.4f}" + ("" if accuracy is None else f", test accuracy {accuracy:.1%}")
    console.print(f"{optimizer.step_count} updates in all: {shown}", markup=False)
    for name in written:
        console.print(f"Wrote {files[name].resolve()}", markup=False)
    return 0


def _write_quantized(model: Path, state: CheckpointState, path: Path) -> None:
    import onnx  # noqa: PLC0415  the rest of the command does without

    from onnxtrain.artifacts import quantize_trained  # noqa: PLC0415  as above: it needs PyTorch

    onnx.save(quantize_trained(model, state), path)


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.test_share < 1:
        raise OptionError("--test-share is no share.", expected="between 0 and 1", got=options.test_share)
    if not (math.isfinite(options.learning_rate) and options.learning_rate > 0):
        raise OptionError("--learning-rate must be positive.", got=options.learning_rate)


def _files(folder: Path, prefix: str) -> dict[str, Path]:
    """The files by their names without the prefix."""
    needed = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
    files = {
        name: folder / f"{prefix}{name}" for name in (*needed, "trained_checkpoint", "inference.onnx", "quantized.onnx")
    }
    missing = [files[name].name for name in needed if not files[name].is_file()]
    if missing:
        todo = "make them: onnxtrain artifacts model.onnx -o out/ (with an optimizer), or give --prefix"
        raise OptionError("The folder lacks artifacts.", str(folder), got=f"no {', '.join(missing)}", todo=todo)
    return files


class _Evaluation:
    """Loss and accuracy on samples that are not trained on."""

    def __init__(self, path: Path, state: CheckpointState) -> None:
        self._session = open_session(path, Device(), ort.SessionOptions())
        metadata = self._session.get_modelmeta().custom_metadata_map
        if METADATA not in metadata:
            todo = "make the artifacts by generate_artifacts of onnxtrain"
            raise TrainingError("The graph is none of onnxtrain's artifacts.", str(path), todo=todo)
        facts = json.loads(metadata[METADATA])
        known = {argument.name: argument for argument in self._session.get_inputs()}
        self.types = {name: (numpy_name(known[name].type), known[name].shape) for name in facts["inputs"]}
        self._labels: str = facts["inputs"][-1]
        self.outputs: list[str] = facts["forward_outputs"]
        self._loss: str = facts["outputs"][0]
        self._parameters = [name for name in known if name not in self.types]
        self._state = state

    @property
    def batch_size(self) -> int | None:
        """The number of samples that the graph asks for; None where it is open."""
        sizes = {shape[0] for _, shape in self.types.values() if shape and isinstance(shape[0], int)}
        return sizes.pop() if len(sizes) == 1 else None

    def __call__(self, batches: Sequence[Mapping[str, Array]]) -> tuple[float, float | None]:
        """The mean loss, and the share of right answers; None for that where the labels are no classes."""
        parameters = {name: self._state.parameters[name].data for name in self._parameters}
        loss, right, count, samples = 0.0, 0, 0, 0
        for batch in batches:
            found, scores = self._session.run([self._loss, self.outputs[0]], {**parameters, **batch})
            labels = batch[self._labels]
            loss += float(np.mean(found)) * len(labels)
            samples += len(labels)
            if labels.dtype == np.int64 and scores.ndim == labels.ndim + 1:
                right += int((scores.argmax(1) == labels).sum())
                count += labels.size
        return loss / samples, right / count if count else None


def _train(
    module: Module,
    optimizer: Optimizer,
    evaluation: _Evaluation,
    training: Mapping[str, Array],
    test: Mapping[str, Array],
    size: int,
    options: argparse.Namespace,
    console: Console,
) -> tuple[float, float | None]:
    """Trains, and gives loss and accuracy on the test samples."""
    fixed = evaluation.batch_size is not None
    tests = list(_batches(test, size, fixed=fixed))
    count = len(next(iter(training.values())))
    steps = count // size if fixed else -(-count // size)
    if not steps or not tests:
        got = f"{count} to train and {len(next(iter(test.values())))} to test with"
        raise TrainingError("There are too few samples for one batch.", expected=f"{size} of each", got=got)
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TextColumn("{task.fields[shown]}"))
    result = evaluation(tests)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=options.epochs * steps, epoch=1, shown=_shown(None, result))
        for epoch in range(options.epochs):
            losses = []
            for batch in _batches(
                training, size, np.random.default_rng([options.seed, optimizer.step_count]), fixed=fixed
            ):
                losses.append(_update(module, optimizer, batch))
                progress.advance(task)
            result = evaluation(tests)
            progress.update(task, epoch=epoch + 1, shown=_shown(float(np.mean(losses)), result))
    return result


def _update(module: Module, optimizer: Optimizer, batch: Mapping[str, Array]) -> float:
    found: Any = module.train()(*batch.values())
    loss = float(np.mean(found[0] if isinstance(found, tuple) else found))
    if not math.isfinite(loss):
        what, todo = "The loss is no finite number.", "give a lower --learning-rate, and look for NaN in the data"
        raise TrainingError(what, f"update {optimizer.step_count}", got=loss, todo=todo)
    optimizer.step()
    module.lazy_reset_grad()
    return loss


def _shown(loss: float | None, test: tuple[float, float | None]) -> str:
    parts = [] if loss is None else [f"loss {loss:.4f}"]
    parts.append(f"test loss {test[0]:.4f}")
    if test[1] is not None:
        parts.append(f"accuracy {test[1]:.1%}")
    return "  ".join(parts)


# Data


def _data(name: str, types: Mapping[str, tuple[str, Sequence[int | str | None]]]) -> dict[str, Array]:
    """An array for each input of the graph, as it takes them."""
    data = _digits(types) if name == _DIGITS else _read(Path(name), types)
    sizes = {input_name: len(array) for input_name, array in data.items()}
    if len(set(sizes.values())) != 1:
        raise TrainingError("The arrays have different numbers of samples.", name, got=str(sizes))
    for input_name, array in data.items():
        dtype, shape = types[input_name]
        fits = array.ndim == len(shape) and all(
            size == given for size, given in zip(shape[1:], array.shape[1:], strict=True) if isinstance(size, int)
        )
        if array.dtype.name != dtype or not fits:
            expected, got = f"{dtype} {_sizes(shape)}", f"{array.dtype.name} {_sizes(array.shape)}"
            what = f"The array for the input {input_name!r} does not fit the graph."
            raise TrainingError(what, name, expected, got, "Convert it first.")
    return data


def _digits(types: Mapping[str, tuple[str, Sequence[int | str | None]]]) -> dict[str, Array]:
    """scikit-learn's digits in the graph's shapes: 8 × 8 pixels between 0 and 1, and which digit they show."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  no dependency of the package
    except ImportError as error:
        raise TrainingError("The digits come with scikit-learn.", todo="pip install scikit-learn") from error
    if len(types) != 2:
        what = "Digits are images and labels; the graph takes other inputs."
        raise TrainingError(what, expected="two inputs", got=", ".join(types), todo=_ADVICE)
    loaded = load_digits()
    (image, (dtype, shape)), (label, (label_dtype, _)) = types.items()
    known = [size for size in shape[1:] if isinstance(size, int)]
    sizes = known if len(known) == len(shape) - 1 else [_PIXELS] if len(shape) == 2 else [1, 8, 8]
    if math.prod(sizes) != _PIXELS or len(sizes) != len(shape) - 1:
        what = f"The digits have {_PIXELS} pixels each, which do not fit the graph's input {image!r}."
        raise TrainingError(what, expected=_sizes(shape), got="(any, 64) or (any, 1, 8, 8)", todo=_ADVICE)
    if not np.issubdtype(np.dtype(dtype), np.floating) or label_dtype not in ("int64", "int32"):
        got = f"{image} {dtype}, {label} {label_dtype}"
        what = "Digits are floating pixels and integer labels; the graph takes other types."
        raise TrainingError(what, expected="float32 and int64", got=got, todo=_ADVICE)
    pixels = (loaded.data / 16).astype(dtype).reshape(-1, *sizes)
    return {image: pixels, label: loaded.target.astype(label_dtype)}


def _read(path: Path, names: Mapping[str, object]) -> dict[str, Array]:
    arrays = ", ".join(f"{name}=..." for name in names)
    todo = f"write it by numpy.savez({path.with_suffix('.npz').name!r}, {arrays})"
    try:
        with np.load(path, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        what = f"The data can be neither {_DIGITS!r} nor read as an .npz file."
        other = path.is_file() and not zipfile.is_zipfile(path)  # numpy's advice is to load such a file unsafely
        raise TrainingError(what, str(path), got="a file of another kind" if other else error, todo=todo) from error
    missing = [name for name in names if name not in held]
    if missing:
        what = "The file lacks an array for an input of the graph."
        raise TrainingError(what, str(path), ", ".join(names), ", ".join(held) or "no arrays", todo)
    if flat := [name for name in names if not held[name].ndim]:
        raise TrainingError("The first axis of each array counts the samples.", str(path), got=f"a number: {flat[0]}")
    return {name: held[name] for name in names}


def _sizes(shape: Sequence[int | str | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def _split(data: Mapping[str, Array], share: float, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    count = len(next(iter(data.values())))
    order = np.random.default_rng(seed).permutation(count)
    cut = count - round(count * share)
    return {n: a[order[:cut]] for n, a in data.items()}, {n: a[order[cut:]] for n, a in data.items()}


def _batches(
    data: Mapping[str, Array], size: int, draw: np.random.Generator | None = None, *, fixed: bool
) -> Iterator[dict[str, Array]]:
    """Batches in a drawn order, or in the data's own; with `fixed` the last one is left out where it is smaller."""
    count = len(next(iter(data.values())))
    order = np.arange(count) if draw is None else draw.permutation(count)
    for start in range(0, count, size):
        taken = order[start : start + size]
        if len(taken) == size or not fixed:
            yield {name: array[taken] for name, array in data.items()}
