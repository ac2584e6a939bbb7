"""Read options from a JSON file, under the keys of ONNX Runtime Training or onnxtrain's own names.

{"FallbackPolicy": ["FALLBACK_DISABLE"], "DebugOptions": {"LogLevel": "INFO"}, "rng": "torch"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from onnxtrain.errors import OptionError
from onnxtrain.options import without_effect
from onnxtrain.options.former import FORMER, warn_former

# ONNX Runtime Training's keys and the options they set. Nested keys are written `Group.Key`.
KEYS: Mapping[str, str] = {
    "DebugOptions.LogLevel": "log_level",
    "DebugOptions.ONNXPrefix": "onnx_prefix",
    "DebugOptions.SaveONNX": "save_onnx",
    "DebugOptions.SaveONNXPath": "save_path",
    "EnableCustomAutogradFunction": "custom_autograd",
    "FallbackPolicy": "fallback_policy",
    "OnnxOpsetVersion": "onnx_opset",
}
_GROUPS = {key.split(".")[0] for key in KEYS if "." in key}


def read(path: str | os.PathLike[str], options: Sequence[str]) -> dict[str, object]:
    """Read the file's options by their names in the tables, current and former, with unparsed values.

    Keys of ONNX Runtime Training that have no effect here are logged as such.

    Args:
        path: the file.
        options: the names of all current options.

    Raises:
        OptionError: the file cannot be read, is not a JSON object, or has an unknown key.
    """
    settings: dict[str, object] = {}
    for key, value in _flattened(_load(path)):
        if key in without_effect.JSON_KEYS:
            without_effect.warn_ineffective(f"The key {key} in {path}", without_effect.JSON_KEYS[key], value)
        elif key in KEYS or key in options:
            settings[KEYS.get(key, key)] = value
        elif key in FORMER:
            warn_former(f"The key {key} in {path}", FORMER[key])
            settings[key] = value
        else:
            valid = sorted([*KEYS, *without_effect.JSON_KEYS, *options])
            raise OptionError(
                "The options file has an unknown key.", str(path), ", ".join(valid), key, "Correct or remove the key."
            )
    return settings


def _load(path: str | os.PathLike[str]) -> Mapping[str, object]:
    problem, todo = "The options file is not valid.", "Correct the file or its path."
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise OptionError(problem, str(path), "a readable file", error.strerror, todo) from error
    except ValueError as error:  # invalid JSON or invalid UTF-8
        raise OptionError(problem, str(path), "JSON", str(error), todo) from error
    if not isinstance(content, dict):
        raise OptionError(problem, str(path), "a JSON object: {...}", type(content).__name__, todo)
    return content


def _flattened(content: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return the entries, with nested keys written `Group.Key`."""
    entries: list[tuple[str, object]] = []
    for key, value in content.items():
        if key in _GROUPS and isinstance(value, dict):
            entries += [(f"{key}.{inner}", inner_value) for inner, inner_value in value.items()]
        else:
            entries.append((key, value))
    return entries
