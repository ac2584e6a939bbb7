"""ORTModule's debugging options: `ORTModule(model, DebugOptions(save_onnx=True, onnx_prefix="bert"))`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxtrain.options import LogLevel, Options

# Messages that ONNX Runtime Training hid, of PyTorch's former exporter and of onnxruntime. Neither runs in a step here.
_EXPORTER_NOISE = (
    "type is missing, so it may result in wrong shape inference",
    "Checker does not support models with experimental ops",
    "No schema registered for",
)
_RUNTIME_NOISE = (
    "CleanUnusedInitializersAndNodeArgs] Removing initializer",
    "Serializing optimized model with Graph Optimization level greater than",
    "Skip building gradient for",
)


@dataclass(frozen=True)
class SaveOnnxOptions:
    """Whether the graphs are written, and the prefix and folder of the files."""

    save: bool
    name_prefix: str
    path: str


@dataclass(frozen=True)
class LoggingOptions:
    """The lowest level that is logged."""

    log_level: LogLevel


class DebugOptions:
    """Settings of the log and of saved graphs. Environment variables override these arguments.

    Args:
        log_level: the lowest level to log (ORTMODULE_LOG_LEVEL).
        save_onnx: write the graph of each stage.
        onnx_prefix: prefix of the file names; required with `save_onnx`.
        save_path: the folder to write to, by default the current one (ORTMODULE_SAVE_ONNX_PATH).
        config: further options by their name in `onnxtrain.Options`, as in `{"rng": "torch"}`.

    Raises:
        OSError: `save_onnx` is set and the folder is missing or not writable.
        TypeError: `log_level` is not a LogLevel, or `save_onnx` is set and `onnx_prefix` is not a str.
        ValueError: `save_onnx` is set and `onnx_prefix` is empty, or an option has an invalid value.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str | os.PathLike[str] = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"Expected log_level of type LogLevel, got {type(log_level).__name__}: {log_level!r}.")
        if save_onnx and not isinstance(onnx_prefix, str):
            raise TypeError(f"Expected onnx_prefix of type str, got {type(onnx_prefix).__name__}: {onnx_prefix!r}.")
        if save_onnx and not onnx_prefix:
            raise ValueError("save_onnx=True requires onnx_prefix, the prefix of the file names; got an empty string.")
        self.log_level = log_level
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        folder = os.path.abspath(save_path)  # os.chdir after this must not redirect the files
        self.settings: dict[str, Any] = {**(config or {}), "log_level": log_level}
        if save_onnx:
            self.settings["save_graphs"] = os.path.join(folder, onnx_prefix)
        self.options = Options.resolve(**self.settings)
        self._folder = folder
        if save_onnx and not os.access(self.save_onnx_models.path, os.W_OK):
            raise OSError(
                f"The folder {self.save_onnx_models.path} does not exist or is not writable. "
                "Pass another save_path, or set the environment variable ORTMODULE_SAVE_ONNX_PATH."
            )

    @property
    def save_onnx_models(self) -> SaveOnnxOptions:
        """Whether the graphs are written, and the prefix and folder of the files, after the environment is applied."""
        prefix = self.options.save_graphs
        if prefix is None:
            return SaveOnnxOptions(False, "", self._folder)
        return SaveOnnxOptions(True, prefix.name, str(prefix.parent.absolute()))

    @property
    def logging(self) -> LoggingOptions:
        """The lowest level that is logged, after the environment is applied."""
        return LoggingOptions(self.options.log_level)

    @property
    def torch_exporter_filter(self) -> list[str] | None:
        """The messages of PyTorch's former exporter that were hidden; None below the level WARNING."""
        return list(_EXPORTER_NOISE) if self.options.log_level >= LogLevel.WARNING else None

    @property
    def onnxruntime_log_filter(self) -> list[str] | None:
        """The messages of onnxruntime that were hidden; None below the level WARNING. It runs no step here."""
        return list(_RUNTIME_NOISE) if self.options.log_level >= LogLevel.WARNING else None
