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
from onnxtrain.options.json_file import KEYS
from onnxtrain.options.without_effect import JSON_KEYS
from onnxtrain.options.without_effect import VARIABLES as WITHOUT_EFFECT

ROOT = Path(__file__).parents[2]
OLD_NAMES = [old.variable for knob in knobs() for old in knob.old_names]

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
        ("ORTMODULE_ENABLE_CUSTOM_AUTOGRAD", "0", "custom_autograd", False),
        ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "1", "custom_autograd", False),
        ("ORTMODULE_DISABLE_CUSTOM_AUTOGRAD_SUPPORT", "0", "custom_autograd", True),
        ("ORTMODULE_CONV_ALGO_SEARCH", "exhaustive", "conv_algo_search", "EXHAUSTIVE"),
        ("ORTMODULE_PRINT_MEMORY_STATS", "1", "print_memory_stats", True),
    ],
)
def test_variables(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    resolved = getattr(Options.resolve(), name)
    assert resolved == value
    assert type(resolved) is type(value)


# Any text is a valid path, names are looked up at their use, and an unknown search only warns.
ANY_TEXT = {k.variable for k in knobs() if k.kind.allowed.startswith(("a path", "names"))}
ANY_TEXT |= {"ORTMODULE_CONV_ALGO_SEARCH"}


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

    def test_every_key_of_the_predecessor(self, tmp_path, caplog):
        options = Options(rng="torch").over_file(self.file(tmp_path, self.PREDECESSORS))
        assert options == Options(
            rng="torch",
            custom_autograd=False,
            log_level=LogLevel.VERBOSE,
            save_onnx=True,
            onnx_prefix="net",
            save_path="graphs",
            fallback_policy="FALLBACK_UNSUPPORTED_DEVICE|FALLBACK_UNSUPPORTED_DATA",
            onnx_opset=17,
        )
        for key in JSON_KEYS:
            assert f"The key {key} in" in caplog.text
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
""".split()  # noqa: SIM905  a list of 41 quoted names would be read by nobody


# The test of each option's effect: its file under tests/, and its name.
EFFECTS = {
    "rng": ("traps/test_random.py", "test_every_step_draws_new_masks_that_follow_the_seed"),
    "native": ("passes/test_channels_last.py", "test_a_step_runs_the_compiled_batch_norm_where_it_may"),
    "reuse_memory": ("execute/test_reused_memory.py", "test_a_steps_memory_serves_the_next"),
    "pause_collector": ("package/test_garbage_collector.py", "test_it_rests_during_a_capture_where_it_is_asked_to"),
    "regions": ("execute/test_regions.py", "test_a_model_trains_as_before_at_all_sizes"),
    "regions_dump": ("execute/test_regions_build.py", "test_the_folder_of_debugging_gets_graph_and_library"),
    "cuda_graphs": ("execute/test_recorded.py", "test_training_is_the_same"),
    "keep_outputs": ("passes/test_skip_ignored_labels.py", "test_outputs_that_are_left_out_raise_and_name_the_option"),
    "memory_budget_bytes": ("plan/test_memory_budget.py", "test_a_share_is_met_and_changes_no_bit"),
    "recompute_cheap": ("plan/test_default_recompute.py", "test_no_bit_changes_and_no_input_is_kept"),
    "compute_optimizer": ("options/test_options_less_work.py", "test_each_can_be_switched_off"),
    "label_sparsity": ("options/test_options_less_work.py", "test_each_can_be_switched_off"),
    "chunked_loss": ("options/test_options_less_work.py", "test_each_can_be_switched_off"),
    "skip_padding": ("options/test_options_less_work.py", "test_each_can_be_switched_off"),
    "disabled_passes": ("passes/test_zoo_without_passes.py", "test_a_disabled_pass_does_not_run"),
    "print_input_density": ("options/test_options_less_work.py", "test_the_density_of_each_step_is_printed"),
    "count_work": ("cli/test_explain.py", "test_work_is_counted_at_the_sizes_of_the_call"),
    "save_onnx": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "onnx_prefix": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "save_path": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "onnx_opset": ("compile/test_stages.py", "test_the_files_of_save_onnx_have_the_names_that_users_know"),
    "log_level": ("observe/test_logs.py", "test_the_level_is_the_loggers"),
    "fallback_policy": ("module/test_faults.py", "test_what_onnxtrain_raises_keeps_its_frames"),
    "fallback_retry": ("module/test_fallback.py", "test_falling_back_is_tried_once_unless_retry_is_asked_for"),
    "pieces": ("dynamo/test_dynamo.py", "test_pieces_can_be_switched_off"),
    "custom_autograd": ("module/test_fallback.py", "test_custom_autograd_can_be_switched_off"),
    "conv_algo_search": ("options/test_options_effects.py", "test_an_exhaustive_search_is_cudnns_benchmark"),
    "print_memory_stats": ("observe/test_memory.py", "test_each_phase_of_a_step"),
    "memory_opt_level": ("plan/test_memory_options.py", "test_less_is_kept_and_no_bit_changes"),
    "memory_opt_config": ("plan/test_memory_options.py", "test_a_count_and_a_kind_decide_how_many"),
    "memory_opt_probe_recompute_level": (
        "plan/test_memory_options.py",
        "test_products_are_in_subgraphs_where_they_are_asked_for",
    ),
    "early_gradients": ("execute/test_early_gradients.py", "test_gradients_are_those_of_one_backward_bit_for_bit"),
    "tuning": ("execute/test_kernel_choice.py", "test_with_tuning_off_known_answers_count_and_nothing_is_measured"),
    "max_tuning_duration_ms": ("execute/test_kernel_choice.py", "test_the_longest_duration_ends_a_measurement"),
    "tuning_results_path": ("execute/test_kernel_choice.py", "test_the_faster_kernel_is_found_and_kept"),
    "cache_dir": ("capture/stored/test_stored.py", "test_a_second_module_takes_the_capture_from_disk"),
    "cache_limit_mb": ("capture/stored/test_stored.py", "test_the_option_cache_limit_mb_bounds_the_folder"),
    "dump_dir": ("compile/test_stages.py", "test_every_stage_is_dumped_and_each_compilation_to_a_folder_of_its_own"),
    "verify": ("compile/test_stages.py", "test_a_faulty_graph_is_refused_unless_verify_is_off"),
}


class TestSweep:
    def test_every_variable_of_the_predecessor_has_an_effect_or_is_logged(self):
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
            assert name in functions, f"the test of {option} is gone"
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
        assert Options.resolve().conv_algo_search == "HEURISTIC"
        assert "Expected one of HEURISTIC, EXHAUSTIVE, got 'banana'; using HEURISTIC." in caplog.text


class TestCommand:
    def test_prints_values_sources_and_meanings(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv("COLUMNS", "320")
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "INFO")
        monkeypatch.setenv("ORTMODULE_TRITON_CONFIG_FILE", "triton.json")
        file = tmp_path / "options.json"
        file.write_text('{"rng": "torch"}')
        assert cli.main(["options", "--json", str(file)]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"log_level +│ INFO +│ ORTMODULE_LOG_LEVEL", shown)
        assert re.search(r"rng +│ torch +│ \S+options.json", shown)
        assert "the lowest level that is logged" in shown
        assert "ORTMODULE_TRITON_CONFIG_FILE is set and has no effect" in shown

    def test_an_invalid_value_is_an_error_without_traceback(self, monkeypatch, capsys):
        monkeypatch.setenv("ORTMODULE_LOG_LEVEL", "LOUD")
        assert cli.main(["options"]) == cli.USAGE
        assert "LOUD" in capsys.readouterr().err
