"""`onnxtrain train out/ --data digits`: train artifacts on a data set, to try them without code."""

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
_ADVICE = "give an .npz file with an array for each input, or artifacts of a model for 8 x 8 digits"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", type=existing_folder, help="the folder of the artifacts")
    parser.add_argument(
        "--data",
        required=True,
        metavar="DATA",
        help="'digits', or an .npz file with an array for each input",
    )
    parser.add_argument("--epochs", type=positive, metavar="N", default=20, help="passes over the data (default: 20)")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="samples per update (default: 32)")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, metavar="RATE", help="the learning rate (default: 0.001)"
    )
    parser.add_argument(
        "--test-share",
        type=float,
        default=0.2,
        metavar="FRACTION",
        help="the fraction of the samples to test on (default: 0.2)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the seed of the sample order and of dropout (default: 0)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint that this command saved")
    parser.add_argument("--prefix", default="", help="prefix of the file names")
    parser.add_argument(
        "--quantized",
        type=existing_file,
        metavar="MODEL",
        help="the quantized model that `onnxtrain artifacts --qat` read: also write it with the trained values",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:<number> (default: cpu)")


def run(options: argparse.Namespace) -> int:
    """Train, and write the checkpoint and the inference model beside the artifacts."""
    _check(options)
    console = Console(soft_wrap=True)
    files = _files(options.folder, options.prefix)
    start = files["trained_checkpoint" if options.resume else "checkpoint"]
    if not start.is_file():
        raise TrainingError(f"{start.name} does not exist.", str(start), todo="train without --resume first")
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
    metrics = f"test loss {loss:.4f}" + ("" if accuracy is None else f", test accuracy {accuracy:.1%}")
    console.print(f"{optimizer.step_count} updates in total: {metrics}", markup=False)
    for name in written:
        console.print(f"Wrote {files[name].resolve()}", markup=False)
    return 0


def _write_quantized(model: Path, state: CheckpointState, path: Path) -> None:
    import onnx  # noqa: PLC0415  only needed here

    from onnxtrain.artifacts import quantize_trained  # noqa: PLC0415  imports PyTorch

    onnx.save(quantize_trained(model, state), path)


def _check(options: argparse.Namespace) -> None:
    if not 0 < options.test_share < 1:
        raise OptionError("Invalid --test-share.", expected="a fraction between 0 and 1", got=options.test_share)
    if not (math.isfinite(options.learning_rate) and options.learning_rate > 0):
        raise OptionError("Invalid --learning-rate.", expected="a positive number", got=options.learning_rate)


def _files(folder: Path, prefix: str) -> dict[str, Path]:
    """Return the files by name without the prefix."""
    required = ("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
    files = {
        name: folder / f"{prefix}{name}"
        for name in (*required, "trained_checkpoint", "inference.onnx", "quantized.onnx")
    }
    missing = [files[name].name for name in required if not files[name].is_file()]
    if missing:
        todo = "generate them with an optimizer: onnxtrain artifacts model.onnx -o out/; or pass --prefix"
        raise OptionError("Artifacts are missing.", str(folder), ", ".join(required), f"no {', '.join(missing)}", todo)
    return files


class _Evaluation:
    """The loss and accuracy on the test samples."""

    def __init__(self, path: Path, state: CheckpointState) -> None:
        self._session = open_session(path, Device(), ort.SessionOptions())
        metadata = self._session.get_modelmeta().custom_metadata_map
        if METADATA not in metadata:
            todo = "generate the artifacts with onnxtrain.artifacts.generate_artifacts"
            raise TrainingError("The graph has no artifact metadata of onnxtrain.", str(path), todo=todo)
        artifact = json.loads(metadata[METADATA])
        arguments = {argument.name: argument for argument in self._session.get_inputs()}
        self.types = {name: (numpy_name(arguments[name].type), arguments[name].shape) for name in artifact["inputs"]}
        self._labels: str = artifact["inputs"][-1]
        self.outputs: list[str] = artifact["forward_outputs"]
        self._loss: str = artifact["outputs"][0]
        self._parameters = [name for name in arguments if name not in self.types]
        self._state = state

    @property
    def batch_size(self) -> int | None:
        """The batch size of the graph; None if it is dynamic."""
        sizes = {shape[0] for _, shape in self.types.values() if shape and isinstance(shape[0], int)}
        return sizes.pop() if len(sizes) == 1 else None

    def __call__(self, batches: Sequence[Mapping[str, Array]]) -> tuple[float, float | None]:
        """Return the mean loss and the accuracy; the accuracy is None if the labels are not classes."""
        parameters = {name: self._state.parameters[name].data for name in self._parameters}
        loss, correct, count, samples = 0.0, 0, 0, 0
        for batch in batches:
            batch_loss, logits = self._session.run([self._loss, self.outputs[0]], {**parameters, **batch})
            labels = batch[self._labels]
            loss += float(np.mean(batch_loss)) * len(labels)
            samples += len(labels)
            if labels.dtype == np.int64 and logits.ndim == labels.ndim + 1:
                correct += int((logits.argmax(1) == labels).sum())
                count += labels.size
        return loss / samples, correct / count if count else None


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
    """Train, and return loss and accuracy on the test samples."""
    fixed = evaluation.batch_size is not None
    tests = list(_batches(test, size, fixed=fixed))
    count = len(next(iter(training.values())))
    steps = count // size if fixed else -(-count // size)
    if not steps or not tests:
        raise TrainingError(
            "The data has fewer samples than one batch.",
            expected=f"at least {size} for training and {size} for testing",
            got=f"{count} for training and {len(next(iter(test.values())))} for testing",
            todo="use more data or another --test-share",
        )
    columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), TextColumn("{task.fields[metrics]}"))
    result = evaluation(tests)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=options.epochs * steps, epoch=1, metrics=_formatted(None, result))
        for epoch in range(options.epochs):
            losses = []
            for batch in _batches(
                training, size, np.random.default_rng([options.seed, optimizer.step_count]), fixed=fixed
            ):
                losses.append(_update(module, optimizer, batch))
                progress.advance(task)
            result = evaluation(tests)
            progress.update(task, epoch=epoch + 1, metrics=_formatted(float(np.mean(losses)), result))
    return result


def _update(module: Module, optimizer: Optimizer, batch: Mapping[str, Array]) -> float:
    outputs: Any = module.train()(*batch.values())
    loss = float(np.mean(outputs[0] if isinstance(outputs, tuple) else outputs))
    if not math.isfinite(loss):
        todo = "lower --learning-rate, and check the data for NaN"
        raise TrainingError("The loss is not finite.", f"update {optimizer.step_count}", "a number", loss, todo)
    optimizer.step()
    module.lazy_reset_grad()
    return loss


def _formatted(loss: float | None, test: tuple[float, float | None]) -> str:
    parts = [] if loss is None else [f"loss {loss:.4f}"]
    parts.append(f"test loss {test[0]:.4f}")
    if test[1] is not None:
        parts.append(f"accuracy {test[1]:.1%}")
    return "  ".join(parts)


# Data


def _data(name: str, types: Mapping[str, tuple[str, Sequence[int | str | None]]]) -> dict[str, Array]:
    """Load an array for each input of the graph, of its dtype and shape."""
    data = _digits(types) if name == _DIGITS else _read(Path(name), types)
    sizes = {input_name: len(array) for input_name, array in data.items()}
    if len(set(sizes.values())) != 1:
        todo = "Give each array one row per sample."
        raise TrainingError("The arrays differ in length.", name, "arrays of equal length", str(sizes), todo)
    for input_name, array in data.items():
        dtype, shape = types[input_name]
        fits = array.ndim == len(shape) and all(
            size == got for size, got in zip(shape[1:], array.shape[1:], strict=True) if isinstance(size, int)
        )
        if array.dtype.name != dtype or not fits:
            expected, got = f"{dtype} {_sizes(shape)}", f"{array.dtype.name} {_sizes(array.shape)}"
            problem = f"The array for the input {input_name!r} does not match the graph."
            raise TrainingError(problem, name, expected, got, "Convert it first.")
    return data


def _digits(types: Mapping[str, tuple[str, Sequence[int | str | None]]]) -> dict[str, Array]:
    """Load scikit-learn's digits in the graph's shapes: images of 8 × 8 pixels between 0 and 1, and their labels."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415  not a dependency of the package
    except ImportError as error:
        problem = f"--data {_DIGITS} requires scikit-learn."
        raise TrainingError(problem, got=error, todo="pip install scikit-learn") from error
    if len(types) != 2:
        problem = f"The graph does not match --data {_DIGITS}, which has images and labels."
        raise TrainingError(problem, expected="a graph of two inputs", got=", ".join(types), todo=_ADVICE)
    loaded = load_digits()
    (image, (dtype, shape)), (label, (label_dtype, _)) = types.items()
    static = [size for size in shape[1:] if isinstance(size, int)]
    sizes = static if len(static) == len(shape) - 1 else [_PIXELS] if len(shape) == 2 else [1, 8, 8]
    if math.prod(sizes) != _PIXELS or len(sizes) != len(shape) - 1:
        problem = f"The shape of the graph's input {image!r} does not match the {_PIXELS} pixels of a digit."
        expected = "a graph whose first input is (any, 64) or (any, 1, 8, 8)"
        raise TrainingError(problem, expected=expected, got=_sizes(shape), todo=_ADVICE)
    if not np.issubdtype(np.dtype(dtype), np.floating) or label_dtype not in ("int64", "int32"):
        got = f"{image} {dtype}, {label} {label_dtype}"
        problem = f"The input dtypes of the graph do not match --data {_DIGITS}."
        raise TrainingError(problem, expected="a floating-point and an integer input", got=got, todo=_ADVICE)
    pixels = (loaded.data / 16).astype(dtype).reshape(-1, *sizes)
    return {image: pixels, label: loaded.target.astype(label_dtype)}


def _read(path: Path, names: Mapping[str, object]) -> dict[str, Array]:
    arrays = ", ".join(f"{name}=..." for name in names)
    todo = f"write it with numpy.savez({path.with_suffix('.npz').name!r}, {arrays})"
    try:
        with np.load(path, allow_pickle=False) as file:
            loaded = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        other = path.is_file() and not zipfile.is_zipfile(path)  # numpy's own message advises to unpickle such a file
        got = "a file of another format" if other else error
        expected = f"{_DIGITS!r}, or the path of an .npz file"
        raise TrainingError("The data cannot be read.", str(path), expected, got, todo) from error
    missing = [name for name in names if name not in loaded]
    if missing:
        problem = "The file lacks an array for an input of the graph."
        raise TrainingError(problem, str(path), ", ".join(names), ", ".join(loaded) or "no arrays", todo)
    if scalars := [name for name in names if not loaded[name].ndim]:
        problem = f"The array {scalars[0]!r} has no dimension for the samples."
        raise TrainingError(problem, str(path), "arrays with a leading dimension of samples", "a scalar", todo)
    return {name: loaded[name] for name in names}


def _sizes(shape: Sequence[int | str | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def _split(data: Mapping[str, Array], test_share: float, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    count = len(next(iter(data.values())))
    order = np.random.default_rng(seed).permutation(count)
    cut = count - round(count * test_share)
    return {n: a[order[:cut]] for n, a in data.items()}, {n: a[order[cut:]] for n, a in data.items()}


def _batches(
    data: Mapping[str, Array], size: int, shuffle: np.random.Generator | None = None, *, fixed: bool
) -> Iterator[dict[str, Array]]:
    """Yield batches in a shuffled order, or in the data's own; with `fixed` a smaller last batch is dropped."""
    count = len(next(iter(data.values())))
    order = np.arange(count) if shuffle is None else shuffle.permutation(count)
    for start in range(0, count, size):
        rows = order[start : start + size]
        if len(rows) == size or not fixed:
            yield {name: array[rows] for name, array in data.items()}
