"""Defaults, then code, then environment; bad values are named; DebugOptions raises what ORTModule's raised."""

import os
import pickle
from pathlib import Path

import pytest

from onnxtrain import errors
from onnxtrain.debug_options import DebugOptions
from onnxtrain.options import FallbackPolicy, LogLevel, Options, knobs

VARIABLES = [knob.variable for knob in knobs() if knob.variable]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_every_knob_is_described_once():
    names = [knob.name for knob in knobs()]
    assert len(set(names)) == len(names)
    assert len(set(VARIABLES)) == len(VARIABLES)
    for knob in knobs():
        assert knob.meaning
        assert knob.kind.allowed
        assert knob.read(knob.default, "the default") == knob.default


def test_environment_wins_over_code_and_code_over_defaults(monkeypatch):
    assert Options.resolve() == Options()
    assert Options.resolve().rng == "fast"
    assert Options.resolve(rng="torch").rng == "torch"
    monkeypatch.setenv("ONNXTRAIN_RNG", "fast")
    assert Options.resolve(rng="torch").rng == "fast"
    monkeypatch.setenv("ONNXTRAIN_RNG", "")
    assert Options.resolve(rng="torch").rng == "torch"


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("ONNXTRAIN_RNG", "torch", "rng", "torch"),
        ("ONNXTRAIN_DUMP", "stages", "dump_dir", Path("stages")),
        ("ONNXTRAIN_VERIFY", "0", "verify", False),
        ("ORTMODULE_LOG_LEVEL", "DEVINFO", "log_level", LogLevel.DEVINFO),
        ("ORTMODULE_SAVE_ONNX_PATH", "graphs", "save_path", Path("graphs")),
        ("ORTMODULE_ONNX_OPSET_VERSION", "17", "onnx_opset", 17),
        ("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE", "fallback_policy", FallbackPolicy.FALLBACK_DISABLE),
        (
            "ORTMODULE_FALLBACK_POLICY",
            "FALLBACK_UNSUPPORTED_DATA | FALLBACK_UNSUPPORTED_DEVICE",
            "fallback_policy",
            FallbackPolicy.FALLBACK_UNSUPPORTED_DATA | FallbackPolicy.FALLBACK_UNSUPPORTED_DEVICE,
        ),
        ("ORTMODULE_FALLBACK_RETRY", "true", "fallback_retry", True),
        ("ORTMODULE_FALLBACK_RETRY", "1", "fallback_retry", True),
        ("ORTMODULE_FALLBACK_RETRY", "Yes", "fallback_retry", True),
        ("ORTMODULE_FALLBACK_RETRY", "no", "fallback_retry", False),
    ],
)
def test_variables(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    resolved = getattr(Options.resolve(), name)
    assert resolved == value
    assert type(resolved) is type(value)


@pytest.mark.parametrize("variable", sorted(set(VARIABLES) - {"ONNXTRAIN_DUMP", "ORTMODULE_SAVE_ONNX_PATH"}))
def test_a_bad_variable_is_named_with_its_value_and_what_is_allowed(monkeypatch, variable):
    monkeypatch.setenv(variable, "banana")
    with pytest.raises(errors.OptionError) as caught:
        Options.resolve()
    (knob,) = (knob for knob in knobs() if knob.variable == variable)
    for part in (variable, "banana", knob.kind.allowed, knob.name):
        assert part in str(caught.value)
    assert isinstance(caught.value, KeyError)  # as ORTModule raised for a bad enum name
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "code",
    [
        {"rng": "slow"},
        {"rng": ["fast"]},
        {"save_onnx": 2},
        {"onnx_prefix": None},
        {"save_path": 3},
        {"onnx_opset": 0},
        {"onnx_opset": True},
        {"onnx_opset": 17.0},
        {"log_level": 2},
        {"fallback_policy": 8},
        {"fallback_policy": ""},
        {"verify": None},
    ],
)
def test_bad_values_in_code(code):
    (name,) = code
    with pytest.raises(errors.OptionError, match=f"the code's {name}="):
        Options.resolve(**code)


def test_the_codes_mistake_shows_even_where_the_environment_wins(monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_RNG", "fast")
    with pytest.raises(errors.OptionError, match="the code's rng="):
        Options.resolve(rng="slow")


def test_unknown_option_is_named():
    with pytest.raises(errors.OptionError, match="colour"):
        Options.resolve(colour="red")


def test_options_do_not_change_and_compare_by_value():
    options = Options(log_level="info", dump_dir="here")
    assert (options.log_level, options.dump_dir) == (LogLevel.INFO, Path("here"))
    assert options == Options(log_level=LogLevel.INFO, dump_dir=Path("here"))
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))
    with pytest.raises(AttributeError):
        options.rng = "torch"


@pytest.mark.parametrize(
    ("policy", "covered", "raised"),
    [
        (Options().fallback_policy, errors.CaptureError, errors.ORTModuleInitException),
        (Options().fallback_policy, errors.UnsupportedOperatorError, errors.GraphError),
        (Options().fallback_policy, errors.ORTModuleDeviceException, errors.KernelError),
        (FallbackPolicy.FALLBACK_UNSUPPORTED_DATA, errors.ORTModuleIOError, errors.CaptureError),
        (FallbackPolicy.FALLBACK_FORCE_TORCH_FORWARD, errors.GradientError, ValueError),
        (FallbackPolicy.FALLBACK_BAD_INITIALIZATION, errors.ORTModuleInitException, errors.ORTModuleIOError),
    ],
)
def test_policy_covers(policy, covered, raised):
    assert policy.covers(covered("x"))
    assert not policy.covers(raised("x"))
    assert not (policy | FallbackPolicy.FALLBACK_DISABLE).covers(covered("x"))


def test_enum_values_are_ortmodules():
    assert [level.name for level in LogLevel] == ["VERBOSE", "DEVINFO", "INFO", "WARNING", "ERROR", "FATAL"]
    assert [int(level) for level in LogLevel] == [0, 1, 2, 3, 4, 5]
    assert [int(policy) for policy in FallbackPolicy] == [1, 2, 4, 8, 16, 32, 64, 128]


class TestDebugOptions:
    def test_defaults(self):
        debug = DebugOptions()
        assert (debug.log_level, debug.save_onnx, debug.onnx_prefix) == (LogLevel.WARNING, False, "")
        assert debug.logging.log_level is LogLevel.WARNING
        saving = debug.save_onnx_models
        assert (saving.save, saving.name_prefix, saving.path) == (False, "", os.getcwd())

    def test_saving(self, tmp_path):
        debug = DebugOptions(save_onnx=True, onnx_prefix="net", save_path=tmp_path, config={"rng": "torch"})
        assert (debug.options.save_onnx, debug.options.onnx_prefix, debug.options.rng) == (True, "net", "torch")
        saving = debug.save_onnx_models
        assert (saving.save, saving.name_prefix, saving.path) == (True, "net", str(tmp_path))

    def test_the_folder_is_fixed_when_the_options_are_made(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        debug = DebugOptions(save_onnx=True, onnx_prefix="net")
        monkeypatch.chdir("/")
        assert debug.save_onnx_models.path == str(tmp_path)

    def test_environment_wins(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
        debug = DebugOptions(LogLevel.ERROR, save_onnx=True, onnx_prefix="net", save_path="elsewhere")
        assert debug.logging.log_level is LogLevel.INFO
        assert debug.save_onnx_models.path == str(tmp_path)

    @pytest.mark.parametrize(
        ("error", "arguments"),
        [
            (TypeError, {"log_level": 3}),
            (TypeError, {"log_level": "INFO"}),
            (TypeError, {"save_onnx": True, "onnx_prefix": 7}),
            (ValueError, {"save_onnx": True}),
            (OSError, {"save_onnx": True, "onnx_prefix": "net", "save_path": "no/such/folder"}),
            (errors.OptionError, {"config": {"rng": "slow"}}),
        ],
    )
    def test_errors(self, error, arguments):
        with pytest.raises(error):
            DebugOptions(**arguments)

    @pytest.mark.parametrize(("level", "filtered"), [(LogLevel.VERBOSE, False), (LogLevel.INFO, False), ("none", True)])
    def test_noise_is_filtered_from_warning_up(self, level, filtered):
        debug = DebugOptions() if level == "none" else DebugOptions(level)
        assert bool(debug.torch_exporter_filter) is filtered
        assert bool(debug.onnxruntime_log_filter) is filtered
