"""Defaults, code, JSON file, environment; invalid values are named; every variable has an effect or is logged."""

import ast
import dataclasses
import json
import logging
import os
import pickle
import re
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from onnxtrain import ORTModule, cli, errors, log
from onnxtrain.options import (
    JSON_VARIABLE,
    PROCESS_VARIABLES,
    FallbackPolicy,
    LogLevel,
    Options,
    knobs,
    resolved,
    warn_ineffective_variables,
)
from onnxtrain.options.debug_options import DebugOptions
from onnxtrain.options.former import FORMER
from onnxtrain.options.json_file import KEYS
from onnxtrain.options.without_effect import JSON_KEYS
from onnxtrain.options.without_effect import VARIABLES as WITHOUT_EFFECT

ROOT = Path(__file__).parents[2]
OLD_NAMES = [old.variable for knob in knobs() for old in knob.old_names]
OLD_NAMES += [old.variable for former in FORMER.values() for old in former.variables]

VARIABLES = [knob.variable for knob in knobs() if knob.variable]


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch):
    for variable in (*VARIABLES, *OLD_NAMES, *PROCESS_VARIABLES, *WITHOUT_EFFECT):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(log, "_logged", set())


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
        ("ONNXTRAIN_SAVE_GRAPHS", "graphs/net", "save_graphs", Path("graphs", "net")),
        ("ONNXTRAIN_SAVE_GRAPHS", "graphs/", "save_graphs", Path("graphs", "model")),
        ("ONNXTRAIN_DUMP", "stages", "save_graphs", Path("stages", "model")),
        ("ORTMODULE_LOG_LEVEL", "DEVINFO", "log_level", LogLevel.DEVINFO),
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
        ("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0", "custom_autograd", False),
        ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1", "custom_autograd", False),
        ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "0", "custom_autograd", True),
        ("ORTMODULE_CONV_ALGO_SEARCH", "exhaustive", "tuning", "exhaustive"),
        ("ORTMODULE_ENABLE_TUNING", "0", "tuning", False),
        ("ORTMODULE_MAX_TUNING_DURATION_MS", "50", "tuning", 50),
        ("ORTMODULE_TUNING_RESULTS_PATH", "times", "cache_dir", Path("times")),
        ("ORTMODULE_PRINT_MEMORY_STATS", "1", "statistics", ("memory",)),
        ("ORTMODULE_MEMORY_OPT_LEVEL", "1", "recompute", "layers"),
        ("ORTMODULE_USE_TRITON", "1", "kernels", "fused-all"),
        ("ONNXTRAIN_REGIONS", "auto", "kernels", "fused"),
        ("ONNXTRAIN_NATIVE", "0", "kernels", "pytorch"),
        ("ONNXTRAIN_REUSE_MEMORY", "1", "process_wide", ("reuse_memory",)),
        ("ORTMODULE_ENABLE_LABEL_SPARSITY_OPT", "0", "disabled_passes", ("skip_ignored_labels",)),
    ],
)
def test_variables(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    resolved = getattr(Options.resolve(), name)
    assert resolved == value
    assert type(resolved) is type(value)


# Any text is a valid path, names are looked up at their use, and an unknown search only warns.
ANY_TEXT = {k.variable for k in knobs() if k.kind.allowed.startswith(("a path", "names"))}


@pytest.mark.parametrize("variable", sorted(set(VARIABLES) - ANY_TEXT))
def test_an_invalid_variable_is_named_with_its_value_and_the_allowed_values(monkeypatch, variable):
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
        {"save_graphs": 3},
        {"kernels": "fast"},
        {"statistics": "speed"},
        {"recompute": "Gelu"},
        {"tuning": -1},
        {"onnx_opset": 0},
        {"onnx_opset": True},
        {"onnx_opset": 17.0},
        {"log_level": 2},
        {"fallback_policy": 8},
        {"fallback_policy": ""},
        {"native": None},
    ],
)
def test_invalid_values_in_code(code):
    (name,) = code
    with pytest.raises(errors.OptionError, match=f"the argument {name}="):
        Options.resolve(**code)


def test_an_invalid_argument_raises_even_if_the_environment_overrides_it(monkeypatch):
    monkeypatch.setenv("ONNXTRAIN_RNG", "fast")
    with pytest.raises(errors.OptionError, match="the argument rng="):
        Options.resolve(rng="slow")


def test_unknown_option_is_named():
    with pytest.raises(errors.OptionError, match="colour"):
        Options.resolve(colour="red")


def test_options_are_immutable_and_compare_by_value():
    options = Options(log_level="info", save_graphs="here")
    assert (options.log_level, options.save_graphs) == (LogLevel.INFO, Path("here"))
    assert options == Options(log_level=LogLevel.INFO, save_graphs=Path("here"))
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
        assert (debug.options.save_graphs, debug.options.rng) == (tmp_path / "net", "torch")
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


class TestSources:
    """Later sources override earlier ones: default, code, JSON file, environment."""

    def source(self, name, **code):
        (row,) = [row for row in resolved(Options(**code)) if row.knob.name == name]
        return row.value, row.source

    def test_precedence(self, tmp_path, monkeypatch):
        assert self.source("rng") == ("fast", "default")
        assert self.source("rng", rng="torch") == ("torch", "code")
        file = tmp_path / "options.json"
        file.write_text('{"rng": "fast"}')
        monkeypatch.setenv(JSON_VARIABLE, str(file))
        assert self.source("rng", rng="torch") == ("fast", str(file))
        assert Options.resolve(rng="torch").rng == "fast"
        monkeypatch.setenv("ONNXTRAIN_RNG", "torch")
        assert self.source("rng") == ("torch", "ONNXTRAIN_RNG")

    def test_the_current_name_of_a_variable_overrides_an_old_one(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1")
        assert self.source("custom_autograd") == (False, "ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT")
        monkeypatch.setenv("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "1")
        assert self.source("custom_autograd") == (True, "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD")

    def test_an_invalid_value_of_an_old_name_is_reported_with_it(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "banana")
        with pytest.raises(errors.OptionError, match="DISABLE_CUSTOM_AUTOGRAD_SUPPORT"):
            Options.resolve()


class TestJson:
    PREDECESSORS: ClassVar = {
        "PropagateCastOps": {"Strategy": "FLOOD_FILL", "Level": 3, "Allow": ["ABC"]},
        "UseExternalGPUAllocator": False,
        "EnableCustomAutogradFunction": False,
        "EnableGradAccOptimization": True,
        "UseStaticShape": True,
        "RunSymbolicShapeInference": False,
        "SkipCheck": ["SKIP_CHECK_BUILD_GRADIENT", "SKIP_CHECK_EXECUTION_AGENT"],
        "DebugOptions": {"LogLevel": "VERBOSE", "SaveONNX": True, "ONNXPrefix": "net", "SaveONNXPath": "graphs"},
        "UseMemoryEfficientGradient": True,
        "FallbackPolicy": ["FALLBACK_UNSUPPORTED_DEVICE", "FALLBACK_UNSUPPORTED_DATA"],
        "OnnxOpsetVersion": 17,
    }

    def file(self, tmp_path, content):
        path = tmp_path / "options.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def test_every_key_of_ort_training(self, tmp_path, caplog):
        options = Options(rng="torch").over_file(self.file(tmp_path, self.PREDECESSORS))
        assert options == Options(
            rng="torch",
            custom_autograd=False,
            log_level=LogLevel.VERBOSE,
            save_graphs="graphs/net",
            fallback_policy="FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_DATA",
            onnx_opset=17,
        )
        for key in JSON_KEYS:
            assert f"The key {key} in" in caplog.text
        assert "former" not in caplog.text
        grouped = {f"{group}.{key}" for group in ("DebugOptions",) for key in self.PREDECESSORS[group]}
        assert {*KEYS, *JSON_KEYS} == {*self.PREDECESSORS, *grouped} - {"DebugOptions"}

    def test_every_option_by_its_own_name(self, tmp_path):
        texts = {k.name: k.kind.text(k.default) for k in knobs() if k.default is not None}
        assert Options().over_file(self.file(tmp_path, texts)) == Options()

    @pytest.mark.parametrize(
        ("content", "named"),
        [
            ("{", "Expecting property name"),
            ("[]", "a JSON object"),
            ({"Colour": 1}, "Colour"),
            ({"DebugOptions": {"Colour": 1}}, "DebugOptions.Colour"),
            ({"rng": "slow"}, "slow"),
            ({"SkipCheck": ["SKIP_ALL"]}, "SKIP_ALL"),
            ({"FallbackPolicy": []}, "FALLBACK_DISABLE"),
        ],
    )
    def test_errors_name_the_file(self, tmp_path, content, named):
        with pytest.raises(KeyError) as caught:
            Options().over_file(self.file(tmp_path, content))
        assert named in str(caught.value)
        assert "options.json" in str(caught.value)

    def test_binary_and_missing_files(self, tmp_path):
        (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
        for name in ("binary.json", "missing.json", ""):
            with pytest.raises(errors.OptionError, match=re.escape(str(tmp_path / name))):
                Options().over_file(tmp_path / name)

    def test_a_module_loads_it_and_is_captured_again(self, tmp_path):
        model = ORTModule(torch.nn.Linear(3, 2))
        before = model(torch.ones(1, 3))
        target = {"SaveONNX": True, "ONNXPrefix": "net", "SaveONNXPath": str(tmp_path)}
        model.load_options(self.file(tmp_path, {"DebugOptions": target}))
        assert torch.equal(model(torch.ones(1, 3)), before)
        assert (tmp_path / "net_torch_exported_training.onnx").exists()


class TestWithoutEffect:
    @pytest.mark.parametrize("variable", WITHOUT_EFFECT)
    def test_each_is_logged_once(self, variable, monkeypatch, caplog):
        row = WITHOUT_EFFECT[variable]
        monkeypatch.setenv(variable, "SKIP_CHECK_DEVICE" if row.kind else "1")
        ORTModule(torch.nn.Linear(1, 1))
        ORTModule(torch.nn.Linear(1, 1))
        (record,) = [r for r in caplog.records if variable in r.getMessage()]
        assert row.reason in record.getMessage()
        assert record.levelno == logging.WARNING

    def test_none_is_also_an_option(self):
        assert not set(WITHOUT_EFFECT) & {*VARIABLES, *OLD_NAMES, *PROCESS_VARIABLES}

    def test_an_unknown_enum_name_is_a_key_error(self, monkeypatch):
        monkeypatch.setenv("ORTMODULE_SKIPCHECK_POLICY", "SKIP_ALL")
        with pytest.raises(KeyError, match="SKIP_ALL"):
            warn_ineffective_variables()

    def test_unknown_ones_are_logged_with_the_most_similar_name(self, monkeypatch, caplog):
        monkeypatch.setenv("ORTMODULE_LOG_LEVLE", "INFO")
        monkeypatch.setenv("ONNXTRAIN_COLOUR", "red")
        warn_ineffective_variables()
        assert "ORTMODULE_LOG_LEVLE is unknown: did you mean ORTMODULE_LOG_LEVEL?" in caplog.text
        assert "ONNXTRAIN_COLOUR is unknown" in caplog.text

    def test_those_with_an_effect_are_not_logged(self, monkeypatch, caplog):
        for variable in (*VARIABLES, *OLD_NAMES, *PROCESS_VARIABLES):
            monkeypatch.setenv(variable, "1")
        warn_ineffective_variables()
        assert not caplog.records


# Every variable that ONNX Runtime Training read.
PREDECESSORS_VARIABLES = """
    ORTMODULE_ONNX_OPSET_VERSION ORTMODULE_FALLBACK_POLICY ORTMODULE_FALLBACK_RETRY ORTMODULE_LOG_LEVEL
    ORTMODULE_SAVE_ONNX_PATH ORTMODULE_SKIPCHECK_POLICY ORTMODULE_CONV_ALGO_SEARCH ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT
    ORTMODULE_ENABLE_CUSTOM_AUTOGRAD ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT ORTMODULE_SKIPPED_AUTOGRAD_FUNCTIONS
    ORTMODULE_ENABLE_COMPUTE_OPTIMIZER ORTMODULE_ENABLE_LABEL_SPARSITY_OPT ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER
    ORTMODULE_ENABLE_EMBEDDING_SPARSE_OPTIMIZER ORTMODULE_ENABLE_INPUT_DENSITY_INSPECTOR ORTMODULE_PRINT_INPUT_DENSITY
    ORTMODULE_PRINT_MEMORY_STATS ORTMODULE_MEMORY_OPT_LEVEL ORTMODULE_MEMORY_OPT_CONFIG
    ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL ORTMODULE_ENABLE_MEMORY_ALLEVIATION
    ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT ORTMODULE_CACHE_DIR ORTMODULE_DEEPCOPY_BEFORE_MODEL_EXPORT
    ORTMODULE_ENABLE_ZERO_STAGE3 ORTMODULE_USE_TRITON ORTMODULE_TRITON_CONFIG_FILE ORTMODULE_TRITON_DEBUG
    ORTMODULE_ENABLE_TUNING ORTMODULE_MAX_TUNING_DURATION_MS ORTMODULE_TUNING_RESULTS_PATH
    ORTMODULE_USE_EFFICIENT_ATTENTION ORTMODULE_USE_FLASH_ATTENTION ORTMODULE_ATEN_SDPA_FALLBACK
    ORTMODULE_JSON_CONFIG_PATH ORTMODULE_TORCH_CPP_DIR ONNXRUNTIME_CUDA_VERSION ONNXRUNTIME_ROCM_VERSION
    ONNXRUNTIME_FORCE_CUDA ONNXRUNTIME_CUDA_NVCC_EXTRA_ARGS
""".split()  # noqa: SIM905  41 quoted names are hard to read


# The test of each option's effect: its file under tests/, and its name.
EFFECTS = {
    "rng": ("traps/test_random.py", "test_every_step_samples_new_masks_that_follow_the_seed"),
    "kernels": ("execute/test_regions.py", "test_training_equals_eager_at_all_sizes"),
    "process_wide": ("execute/test_reused_memory.py", "test_the_next_step_reuses_a_steps_memory"),
    "cuda_graphs": ("execute/test_recorded_program.py", "test_training_is_the_same"),
    "keep_outputs": ("passes/test_skip_ignored_labels.py", "test_outputs_that_are_not_kept_raise_and_name_the_option"),
    "memory_budget_bytes": ("plan/test_memory_budget.py", "test_a_share_is_met_and_changes_no_bit"),
    "recompute": ("plan/test_memory_options.py", "test_less_is_kept_and_no_bit_changes"),
    "early_gradients": ("execute/test_early_gradients.py", "test_gradients_are_bitwise_those_of_one_backward"),
    "skip_padding": ("options/test_options_less_work.py", "test_each_can_be_switched_off"),
    "disabled_passes": ("passes/test_zoo_without_passes.py", "test_a_disabled_pass_does_not_run"),
    "statistics": ("cli/test_explain.py", "test_work_is_counted_at_the_sizes_of_the_call"),
    "save_graphs": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "onnx_opset": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "log_level": ("observe/test_logs.py", "test_the_level_is_the_loggers"),
    "fallback_policy": ("module/test_faults.py", "test_errors_of_onnxtrain_keep_their_frames"),
    "fallback_retry": ("module/test_fallback.py", "test_capture_is_retried_only_on_request"),
    "capture_seconds": ("module/test_capture_seconds.py", "test_a_capture_that_takes_too_long_is_given_up"),
    "pieces": ("dynamo/test_dynamo.py", "test_pieces_can_be_switched_off"),
    "custom_autograd": ("module/test_fallback.py", "test_custom_autograd_can_be_switched_off"),
    "tuning": (
        "execute/test_kernel_choice.py",
        "test_with_tuning_off_earlier_answers_are_used_and_nothing_is_measured",
    ),
    "cache_dir": ("capture/stored/test_stored.py", "test_a_second_module_loads_the_capture_from_disk"),
}


class TestFormerOptions:
    """Each sets what replaced it, with a notice that says so; variables of ONNX Runtime Training need none."""

    EXAMPLES: ClassVar = {
        "native": (False, {"kernels": "pytorch"}),
        "regions": ("auto", {"kernels": "fused"}),
        "reuse_memory": (True, {"process_wide": ("reuse_memory",)}),
        "pause_collector": (True, {"process_wide": ("pause_collector",)}),
        "recompute_cheap": (False, {"recompute": "none"}),
        "memory_opt_level": (2, {"recompute": "all"}),
        "memory_opt_config": ("Gelu+:1:-1", {"recompute": "Gelu+:1:-1"}),
        "memory_opt_probe_recompute_level": ("1", {}),
        "compute_optimizer": (
            False,
            {"disabled_passes": "skip_ignored_labels,hoist_gathers,chunk_losses", "skip_padding": "never"},
        ),
        "label_sparsity": (False, {"disabled_passes": "skip_ignored_labels"}),
        "chunked_loss": (False, {"disabled_passes": "chunk_losses"}),
        "print_input_density": (True, {"statistics": "input_density"}),
        "print_memory_stats": (True, {"statistics": "memory"}),
        "count_work": (True, {"statistics": "work"}),
        "save_onnx": (True, {"save_graphs": "model"}),
        "onnx_prefix": ("net", {}),
        "save_path": ("graphs", {}),
        "dump_dir": ("graphs", {"save_graphs": "graphs/model"}),
        "regions_dump": ("graphs", {"save_graphs": "graphs/model"}),
        "enable_tuning": (False, {"tuning": False}),
        "max_tuning_duration_ms": (20, {"tuning": 20}),
        "conv_algo_search": ("EXHAUSTIVE", {"tuning": "exhaustive"}),
        "tuning_results_path": ("times", {"cache_dir": "times"}),
        "cache_limit_mb": (10, {}),
        "verify": (False, {}),
    }

    def test_there_is_an_example_of_each(self):
        assert list(FORMER) == list(self.EXAMPLES)

    @pytest.mark.parametrize("name", FORMER)
    def test_in_code(self, name, caplog):
        value, now = self.EXAMPLES[name]
        for _ in range(2):
            assert Options.resolve(**{name: value}) == Options(**now)
        (record,) = caplog.records
        assert record.getMessage() == f"onnxtrain: The option {name} is a former name: {FORMER[name].advice}."

    @pytest.mark.parametrize("name", [name for name in FORMER if FORMER[name].variables])
    def test_in_the_environment(self, name, monkeypatch, caplog):
        value, now = self.EXAMPLES[name]
        for variable in FORMER[name].variables:
            opposite = variable.variable == "ORTMODULE_USE_TRITON"
            monkeypatch.setenv(variable.variable, "1" if opposite else str(value))
            expected = {"kernels": "fused-all"} if opposite else now
            assert Options.resolve() == Options(**expected), variable
            assert (variable.variable in caplog.text) is variable.is_own
            monkeypatch.delenv(variable.variable)

    def test_in_a_json_file(self, tmp_path, caplog):
        file = tmp_path / "options.json"
        file.write_text('{"regions": "on", "label_sparsity": false}')
        assert Options().over_file(file) == Options(kernels="fused-all", disabled_passes="skip_ignored_labels")
        assert "The key regions in" in caplog.text

    @pytest.mark.parametrize(
        ("code", "environment", "expected"),
        [
            ({"kernels": "fused"}, {"ONNXTRAIN_NATIVE": "1"}, {"kernels": "fused"}),
            ({"kernels": "fused"}, {"ONNXTRAIN_NATIVE": "0"}, {"kernels": "pytorch"}),
            ({"kernels": "pytorch"}, {"ONNXTRAIN_REGIONS": "on"}, {"kernels": "pytorch"}),
            ({}, {"ONNXTRAIN_NATIVE": "0", "ONNXTRAIN_KERNELS": "fused"}, {"kernels": "fused"}),
            ({"recompute": "layers"}, {"ORTMODULE_MEMORY_OPT_LEVEL": "0"}, {}),
            ({"recompute": "none"}, {"ORTMODULE_MEMORY_OPT_LEVEL": "0"}, {"recompute": "none"}),
            (
                {"memory_opt_config": "Gelu+:1:2"},
                {"ORTMODULE_MEMORY_OPT_LEVEL": "1"},
                {"recompute": "layers"},
            ),
            (
                {"disabled_passes": "skip_ignored_labels,fuse_sums"},
                {"ORTMODULE_ENABLE_LABEL_SPARSE_OPTIMIZER": "1", "ONNXTRAIN_CHUNKED_LOSS": "0"},
                {"disabled_passes": "fuse_sums,chunk_losses"},
            ),
            (
                {},
                {"ORTMODULE_ENABLE_TUNING": "1", "ORTMODULE_MAX_TUNING_DURATION_MS": "200"},
                {"tuning": 200},
            ),
            ({"tuning": 200}, {"ORTMODULE_ENABLE_TUNING": "1"}, {"tuning": 200}),
            ({"tuning": False}, {"ORTMODULE_ENABLE_TUNING": "1"}, {}),
            ({"tuning": False}, {"ORTMODULE_MAX_TUNING_DURATION_MS": "200"}, {"tuning": False}),
            ({"save_graphs": "here/net"}, {"ORTMODULE_SAVE_ONNX_PATH": "there"}, {"save_graphs": "there/net"}),
            ({"save_onnx": True, "onnx_prefix": "net"}, {"ORTMODULE_SAVE_ONNX_PATH": "x"}, {"save_graphs": "x/net"}),
            ({"cache_dir": "here"}, {"ORTMODULE_TUNING_RESULTS_PATH": "there"}, {"cache_dir": "here"}),
            ({"statistics": "work"}, {"ORTMODULE_PRINT_MEMORY_STATS": "1"}, {"statistics": "work,memory"}),
        ],
        ids=str,
    )
    def test_together_with_current_ones(self, code, environment, expected, monkeypatch):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert Options.resolve(**code) == Options(**expected)

    def test_there_are_few_options_and_variables(self):
        own = {name for name in (*VARIABLES, *PROCESS_VARIABLES) if name.startswith("ONNXTRAIN_")}
        assert len(knobs()) <= 21
        assert len(own) <= 8


class TestSweep:
    def test_every_variable_of_ort_training_has_an_effect_or_is_logged(self):
        assert not set(PREDECESSORS_VARIABLES) - {*VARIABLES, *OLD_NAMES, *PROCESS_VARIABLES, *WITHOUT_EFFECT}

    def test_the_package_reads_no_variable_that_the_table_lacks(self):
        paths = [
            path for path in (ROOT / "onnxtrain").rglob("*.py") if "dropin" not in path.parts
        ]  # that has old names
        sources = [path.read_text() for path in paths]
        read = {name for text in sources for name in re.findall(r'"((?:ORTMODULE|ONNXTRAIN)_[A-Z0-9_]+)"', text)}
        assert not read - {*VARIABLES, *OLD_NAMES, *PROCESS_VARIABLES, *WITHOUT_EFFECT}

    def test_every_option_has_a_test_of_its_effect(self):
        assert [knob.name for knob in knobs()] == list(EFFECTS), "a new option needs a test of its effect, named there"
        for option, (file, name) in EFFECTS.items():
            source = (ROOT / "tests" / file).read_text()
            functions = {n.name: n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)}
            assert name in functions, f"the test of {option} does not exist"
            text = ast.unparse(functions[name])
            assert "assert " in text or "pytest.raises" in text, f"{name} asserts nothing"
            (knob,) = [knob for knob in knobs() if knob.name == option]
            assert any(word in source for word in (option, knob.variable) if word), f"{file} does not set {option}"

    def test_every_option_can_be_set_by_code(self):
        for knob in knobs():
            assert getattr(Options.resolve(**{knob.name: knob.default}), knob.name) == knob.default
        assert [field.name for field in dataclasses.fields(Options)] == [knob.name for knob in knobs()]

    def test_an_unknown_search_warns_and_reverts(self, monkeypatch, caplog):
        monkeypatch.setenv("ORTMODULE_CONV_ALGO_SEARCH", "banana")
        assert Options.resolve().tuning is True
        assert "Expected one of HEURISTIC, EXHAUSTIVE, got 'banana'; using HEURISTIC." in caplog.text


class TestCommand:
    def test_prints_values_sources_and_meanings(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("COLUMNS", "320")
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        monkeypatch.setenv("ORTMODULE_TRITON_CONFIG_FILE", "triton.json")
        monkeypatch.chdir(tmp_path)  # a long path would be folded
        Path("options.json").write_text('{"rng": "torch"}', encoding="utf-8")
        assert cli.main(["options", "--json", "options.json"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"log_level +│ INFO +│ ORTMODULE_LOG_LEVEL", shown)
        assert re.search(r"rng +│ torch +│ \S*options.json", shown)
        assert "the minimum level of logged messages" in shown
        assert "ORTMODULE_TRITON_CONFIG_FILE is set and has no effect" in shown

    def test_an_invalid_value_is_an_error_without_traceback(self, monkeypatch, capsys):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
        assert cli.main(["options"]) == cli.USAGE
        assert "LOUD" in capsys.readouterr().err
