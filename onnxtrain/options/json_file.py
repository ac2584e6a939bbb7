"""Options from a JSON file, in the form of ONNX Runtime Training's or by onnxtrain's own names.

{"FallbackPolicy": ["FALLBACK_DISABLE"], "DebugOptions": {"LogLevel": "INFO"}, "rng": "torch"}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from onnxtrain.errors import OptionError
from onnxtrain.options import without_effect

# ONNX Runtime Training's keys and the options they stand for; a key in a group has the group's name before it.
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
    """The file's options by their names in the table, as the file gives them.

    Keys of ONNX Runtime Training that have nothing to switch here are answered in the log.

    Args:
        path: the file.
        options: the names that there are.

    Raises:
        OptionError: the file cannot be read or is no JSON object, or has a key that does not exist.
    """
    found: dict[str, object] = {}
    for key, value in _keys(_load(path)):
        if key in without_effect.JSON_KEYS:
            without_effect.answer(f"The key {key} in {path}", without_effect.JSON_KEYS[key], value)
        elif key in KEYS or key in options:
            found[KEYS.get(key, key)] = value
        else:
            known = sorted([*KEYS, *without_effect.JSON_KEYS, *options])
            raise OptionError("There is no such key.", str(path), ", ".join(known), key, "Correct or remove it.")
    return found


def _load(path: str | os.PathLike[str]) -> Mapping[str, object]:
    what, todo = "The JSON file of options cannot be used.", "Correct the file or its path."
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except OSError as error:
        raise OptionError(what, str(path), "a file that can be read", error.strerror, todo) from error
    except ValueError as error:  # no JSON, or no text
        raise OptionError(what, str(path), "JSON", str(error), todo) from error
    if not isinstance(content, dict):
        raise OptionError(what, str(path), "an object: {...}", type(content).__name__, todo)
    return content


def _keys(content: Mapping[str, object]) -> list[tuple[str, object]]:
    """The keys, those of a group with its name before them."""
    keys: list[tuple[str, object]] = []
    for key, value in content.items():
        if key in _GROUPS and isinstance(value, dict):
            keys += [(f"{key}.{inner}", each) for inner, each in value.items()]
        else:
            keys.append((key, value))
    return keys
