"""Errors say what went wrong, where, expected against got and what to do; the ORTModule class hierarchy is kept."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from onnxtrain import errors
from tests.limits import WAIT_LIMIT_S

FALLBACK = [
    errors.ORTModuleInitException,
    errors.ORTModuleDeviceException,
    errors.ORTModuleIOError,
    errors.ORTModuleTorchModelException,
    errors.ORTModuleONNXModelException,
    errors.CaptureError,
    errors.UnsupportedOperatorError,
    errors.GradientError,
    errors.CompileError,
]
OWN_FAULTS = [errors.GraphError, errors.KernelError, errors.OptionError]


def test_message_has_every_part_on_its_own_line():
    error = errors.GraphError("The input has another rank.", "model.py:7", "rank 2", "rank 3", "Flatten it first.")
    assert str(error).splitlines() == [
        "The input has another rank.",
        "  where:    model.py:7",
        "  expected: rank 2",
        "  got:      rank 3",
        "  to do:    Flatten it first.",
    ]


def test_message_omits_missing_parts():
    assert str(errors.CaptureError("No graph.")) == "No graph."
    assert str(errors.CaptureError("No graph.", todo="Look up.")) == "No graph.\n  to do:    Look up."
    assert str(errors.CaptureError("Count.", got=0)) == "Count.\n  got:      0"  # a falsy value is shown


@pytest.mark.parametrize("kind", FALLBACK + OWN_FAULTS)
@pytest.mark.parametrize("rebuild", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_survive_a_process_boundary(kind, rebuild):
    error = kind("problem", "where", "expected", got=3, todo="todo")
    again = rebuild(error)
    assert type(again) is kind
    assert str(again) == str(error)
    parts = (again.problem, again.where, again.expected, again.got, again.todo)
    assert parts == ("problem", "where", "expected", 3, "todo")


def test_a_renamed_error_keeps_its_old_name():
    with pytest.warns(DeprecationWarning, match="OutputNotKeptError"):
        assert errors.LeftOutError is errors.OutputNotKeptError
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = errors.NoSuchError


def test_class_hierarchy():
    assert all(issubclass(kind, errors.ORTModuleFallbackException) for kind in FALLBACK)
    assert not any(issubclass(kind, errors.ORTModuleFallbackException) for kind in OWN_FAULTS)
    assert all(issubclass(kind, errors.OnnxTrainError) for kind in FALLBACK + OWN_FAULTS)
    assert issubclass(errors.CaptureError, errors.ORTModuleTorchModelException)
    assert issubclass(errors.UnsupportedOperatorError, errors.ORTModuleONNXModelException)
    assert issubclass(errors.GradientError, errors.ORTModuleONNXModelException)


def test_public_names_load_on_first_use():
    script = """
import sys
import onnxtrain
from onnxtrain import errors, report
assert onnxtrain.errors is errors and onnxtrain.OnnxTrainError is errors.OnnxTrainError
assert onnxtrain.LogLevel.WARNING == 3 and onnxtrain.DebugOptions().log_level == 3
assert set(onnxtrain.__all__) <= set(dir(onnxtrain))
assert not hasattr(onnxtrain, "nothing")
assert "torch" not in sys.modules, "the options and errors must load without PyTorch"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_LIMIT_S, cwd=Path(__file__).parents[2])
