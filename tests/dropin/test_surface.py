"""The names, signatures and defaults that scripts of ONNX Runtime Training use, in their original modules."""

from __future__ import annotations

import importlib
import inspect
import math
import pickle
import subprocess
import sys

import onnxruntime
import pytest

import onnxtrain.dropin
from onnxtrain import errors
from tests.reference import assert_matches

REQUIRED = inspect.Parameter.empty
TRAINING = "onnxruntime.training"

# The names of each module.
NAMES = {
    "": "PropagateCastOpsStrategy TrainingParameters is_ortmodule_available amp artifacts optim ORTModule experimental "
    "has_collective_ops is_triton_enabled is_torch_interop_default_on set_seed",
    "ortmodule": "ORTModule DebugOptions LogLevel register_graph_optimizer ONNX_OPSET_VERSION "
    "MINIMUM_RUNTIME_PYTORCH_VERSION_STR ORTMODULE_FALLBACK_POLICY ORTMODULE_FALLBACK_RETRY "
    "ORTMODULE_IS_DETERMINISTIC ORTMODULE_TORCH_CPP_DIR ORTModuleFallbackException ORTModuleInitException "
    "is_ortmodule_available is_torch_cpp_extensions_installed ONNXRUNTIME_CUDA_VERSION "
    "ONNXRUNTIME_ROCM_VERSION set_seed",
    "ortmodule.ortmodule": "ORTModule",
    "ortmodule.options": "DebugOptions LogLevel _SkipCheck",
    "ortmodule._fallback": "_FallbackPolicy ORTModuleFallbackException ORTModuleInitException "
    "ORTModuleDeviceException ORTModuleIOError ORTModuleTorchModelException ORTModuleONNXModelException",
    "ortmodule._fallback_exceptions": "ORTModuleFallbackException ORTModuleONNXModelException",
    "ortmodule._custom_autograd_function": "enable_custom_autograd_support",
    "ortmodule.graph_optimizer_registry": "GraphOptimizerRegistry register_graph_optimizer",
    "ortmodule.graph_optimizers.utils": "GraphMatcher check_attribute_value make_constant_node update_graph",
    "ortmodule.torch_cpp_extensions": "is_installed",
    "ortmodule.torch_cpp_extensions.install": "build_torch_cpp_extensions",
    "ortmodule.experimental.json_config": "load_from_json JSON_PATH_ENVIRONMENT_KEY",
    "ortmodule.experimental.hierarchical_ortmodule": "HierarchicalORTModule",
    "optim": "FusedAdam AdamWMode FP16_Optimizer SGDConfig AdamConfig LambConfig lr_scheduler config "
    "ConstantWarmupLRScheduler CosineWarmupLRScheduler LinearWarmupLRScheduler PolyWarmupLRScheduler",
    "optim.config": "SGDConfig AdamConfig LambConfig",
    "optim.lr_scheduler": "ConstantWarmupLRScheduler CosineWarmupLRScheduler LinearWarmupLRScheduler "
    "PolyWarmupLRScheduler",
    "optim.fused_adam": "FusedAdam AdamWMode",
    "optim.fp16_optimizer": "FP16_Optimizer",
    "amp": "loss_scaler LossScaler DynamicLossScaler",
    "amp.loss_scaler": "LossScaler DynamicLossScaler",
    "utils": "PrimitiveType ORTModelInputOutputType ORTModelInputOutputSchemaType extract_data_and_schema "
    "unflatten_data_using_schema torch_nvtx_range_push torch_nvtx_range_pop nvtx_function_decorator log_memory_usage "
    "pytorch_type_to_onnx_dtype onnx_dtype_to_pytorch_dtype pytorch_scalar_type_to_pytorch_dtype PTable",
    "utils.torch_io_helper": "extract_data_and_schema unflatten_data_using_schema",
    "utils.ptable": "PTable Row",
    "utils.hooks": "SubscriberManager GlobalSubscriberManager SubscriberBase StatisticsSubscriber inspect_activation "
    "ZeROOffloadSubscriber configure_ort_compatible_zero_stage3",
    "utils.hooks.merge_activation_summary": "",
    "utils.torch_type_map": "pytorch_type_to_onnx_dtype onnx_dtype_to_pytorch_dtype "
    "pytorch_scalar_type_to_pytorch_dtype",
    "utils.torch_profile_utils": "torch_nvtx_range_push torch_nvtx_range_pop nvtx_function_decorator log_memory_usage",
    "utils.data.sampler": "LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler "
    "shard_wrapped_indices_for_worker",
    "utils.data": "LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler",
    "api": "CheckpointState Module Optimizer LinearLRScheduler",
    "api.checkpoint_state": "CheckpointState Parameter Parameters Properties",
    "api.module": "Module",
    "api.optimizer": "Optimizer",
    "api.lr_scheduler": "LinearLRScheduler",
    "artifacts": "generate_artifacts LossType OptimType",
    "onnxblock": "Block ForwardBlock TrainingBlock base empty_base custom_op_library save_checkpoint "
    "load_checkpoint_to_model blocks loss optim",
    "onnxblock.blocks": "Add Sub Mul Div Pow ReduceMean ReduceSum Sigmoid Log Neg Abs Constant SequenceConstruct "
    "ReduceAllL2 Clip PassThrough InputLike LabelEncoder Cast Linear Block",
    "onnxblock.loss": "MSELoss CrossEntropyLoss BCEWithLogitsLoss L1Loss",
    "onnxblock.optim": "AdamW SGD ClipGradNorm",
    "onnxblock.loss.loss": "MSELoss CrossEntropyLoss BCEWithLogitsLoss L1Loss",
    "onnxblock.optim.optim": "AdamW SGD ClipGradNorm",
    "onnxblock.onnxblock": "ForwardBlock TrainingBlock",
    "onnxblock.model_accessor": "ModelAccessor base empty_base custom_op_library",
    "onnxblock.checkpoint_utils": "save_checkpoint load_checkpoint_to_model",
    "ort_triton": "register_triton_kernel",
    "experimental": "export_gradient_graph",
    "experimental.gradient_graph": "export_gradient_graph",
    "experimental.exporter": "_export_jit_graph_to_onnx_model_proto",
    "torchdynamo.register_backend": "aot_ort dynamic_aot_ort ort DEFAULT_BACKEND make_aot_ort",
    "torchdynamo.ort_backend": "OrtBackend",
}

# The parameters and defaults of what is called.
SIGNATURES: dict[str, dict[str, object]] = {
    "ortmodule.ORTModule": {"module": REQUIRED, "debug_options": None},
    "ortmodule.DebugOptions": {
        "log_level": 3, "save_onnx": False, "onnx_prefix": "", "save_path": "", "config": None,
    },
    "ortmodule.register_graph_optimizer": {"target_modules": "all", "devices": "all", "priority": 0},
    "ortmodule._custom_autograd_function.enable_custom_autograd_support": {"to_enable": True},
    "ortmodule.experimental.json_config.load_from_json": {"ortmodule": REQUIRED, "path": None},
    "ortmodule.experimental.hierarchical_ortmodule.HierarchicalORTModule": {"module": REQUIRED, "debug_options": None},
    "experimental.export_gradient_graph": {
        "model": REQUIRED, "loss_fn": REQUIRED, "example_input": REQUIRED, "example_labels": REQUIRED,
        "gradient_graph_path": REQUIRED, "opset_version": 12,
    },
    "optim.FusedAdam": {
        "params": REQUIRED, "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-6, "adam_w_mode": 1,
        "weight_decay": 0.0, "set_grad_none": True,
    },
    "optim.FusedAdam.step": {"self": REQUIRED, "closure": None},
    "optim.FusedAdam.zero_grad": {"self": REQUIRED, "set_to_none": True},
    "optim.FP16_Optimizer": {"optimizer": REQUIRED, "kwargs": REQUIRED},
    "optim.SGDConfig": {"params": (), "lr": 0.001},
    "optim.AdamConfig": {
        "params": (), "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "epsilon": 1e-8,
        "max_norm_clip": 1.0, "do_bias_correction": True, "weight_decay_mode": 0,
    },
    "optim.LambConfig": {
        "params": (), "lr": 0.001, "alpha": 0.9, "beta": 0.999, "lambda_coef": 0.0, "ratio_min": -math.inf,
        "ratio_max": math.inf, "epsilon": 1e-6, "max_norm_clip": 1.0, "do_bias_correction": False,
    },
    "optim.lr_scheduler.ConstantWarmupLRScheduler": {"total_steps": REQUIRED, "warmup": 0.002},
    "optim.lr_scheduler.CosineWarmupLRScheduler": {"total_steps": REQUIRED, "cycles": 0.5, "warmup": 0.002},
    "optim.lr_scheduler.LinearWarmupLRScheduler": {"total_steps": REQUIRED, "warmup": 0.002},
    "optim.lr_scheduler.PolyWarmupLRScheduler": {
        "total_steps": REQUIRED, "lr_end": 1e-7, "power": 1.0, "warmup": 0.002,
    },
    "amp.loss_scaler.LossScaler": {"loss_scale": REQUIRED},
    "amp.loss_scaler.DynamicLossScaler": {
        "automatic_update": True, "loss_scale": 65536, "up_scale_window": 2000, "min_loss_scale": 1.0,
        "max_loss_scale": 2**24,
    },
    "utils.extract_data_and_schema": {"data": REQUIRED, "constant_as_tensor": False, "device": None},
    "utils.unflatten_data_using_schema": {"data": REQUIRED, "schema": REQUIRED},
    "utils.torch_nvtx_range_push": {"msg": REQUIRED},
    "utils.torch_nvtx_range_pop": {},
    "utils.nvtx_function_decorator": {"fn": REQUIRED},
    "utils.log_memory_usage": {
        "cur_phase": REQUIRED, "rank_0_only": True, "step_info": "", "logger": None, "module": None,
    },
    "utils.PTable": {"sortable": False},
    "utils.hooks.SubscriberManager.subscribe": {"self": REQUIRED, "module": REQUIRED, "subscribers": REQUIRED},
    "utils.hooks.SubscriberBase": {"start_step": None, "end_step": None},
    "utils.hooks.SubscriberBase.pre_forward_module_apply_impl": {
        "self": REQUIRED, "run_rtx": REQUIRED, "module": REQUIRED, "args": REQUIRED, "kwargs": REQUIRED,
    },
    "utils.hooks.SubscriberBase.post_forward_tensor_apply_impl": {
        "self": REQUIRED, "run_rtx": REQUIRED, "module": REQUIRED, "tensor_idx": REQUIRED, "tensor": REQUIRED,
    },
    "utils.hooks.SubscriberBase.post_forward_outmost_module_apply_impl": {
        "self": REQUIRED, "run_rtx": REQUIRED, "module": REQUIRED, "args": REQUIRED, "outputs": REQUIRED,
    },
    "utils.hooks.StatisticsSubscriber": {
        "output_dir": REQUIRED, "start_step": None, "end_step": None, "override_output_dir": False,
        "run_on_cpu": False, "bucket_size": 2**29,
    },
    "utils.hooks.inspect_activation": {"activation_name": REQUIRED, "tensor": REQUIRED},
    "utils.hooks.configure_ort_compatible_zero_stage3": {
        "debug": False, "stats_output_dir": "./", "stats_overwrite": False,
    },
    "utils.data.LoadBalancingDistributedSampler": {
        "dataset": REQUIRED, "complexity_fn": REQUIRED, "world_size": None, "rank": None, "shuffle": True,
        "group_size": None, "seed": 0, "drop_last": False, "random_level": 0,
    },
    "utils.data.LoadBalancingDistributedBatchSampler": {"sampler": REQUIRED, "batch_fn": REQUIRED, "drop_last": False},
    "torchdynamo.ort_backend.OrtBackend": {"ep": "", "preallocate_output": False},
    "torchdynamo.ort_backend.OrtBackend.compile": {"self": REQUIRED, "graph_module": REQUIRED, "args": REQUIRED},
    "torchdynamo.register_backend.make_aot_ort": {"dynamic": False},
    "artifacts.generate_artifacts": {
        "model": REQUIRED, "requires_grad": None, "frozen_params": None, "loss": None, "optimizer": None,
        "artifact_directory": None, "prefix": "", "ort_format": False, "custom_op_library": None,
        "additional_output_names": None, "nominal_checkpoint": False, "loss_input_names": None,
    },
    "api.Module": {
        "train_model_uri": REQUIRED, "state": REQUIRED, "eval_model_uri": None, "device": "cpu",
        "session_options": None,
    },
    "api.LinearLRScheduler": {
        "optimizer": REQUIRED, "warmup_step_count": REQUIRED, "total_step_count": REQUIRED, "initial_lr": REQUIRED,
    },
}  # fmt: skip

ENUMS = {
    "PropagateCastOpsStrategy": "NONE=0 INSERT_AND_REDUCE=1 FLOOD_FILL=2",
    "ortmodule.LogLevel": "VERBOSE=0 DEVINFO=1 INFO=2 WARNING=3 ERROR=4 FATAL=5",
    "ortmodule.options._SkipCheck": "SKIP_CHECK_DISABLED=1 SKIP_CHECK_DEVICE=2 SKIP_CHECK_BUILD_GRADIENT=4 "
    "SKIP_CHECK_EXECUTION_AGENT=8",
    "ortmodule._fallback._FallbackPolicy": "FALLBACK_DISABLE=1 FALLBACK_FORCE_TORCH_FORWARD=2 "
    "FALLBACK_FORCE_TORCH_BACKWARD=4 FALLBACK_UNSUPPORTED_DEVICE=8 FALLBACK_UNSUPPORTED_DATA=16 "
    "FALLBACK_UNSUPPORTED_TORCH_MODEL=32 FALLBACK_UNSUPPORTED_ONNX_MODEL=64 FALLBACK_BAD_INITIALIZATION=128",
    "optim.AdamWMode": "ADAM_L2_REGULARIZATION=0 ADAMW_TRANSFORMERS=1 ADAMW_TORCH=2",
    "artifacts.LossType": "MSELoss=1 CrossEntropyLoss=2 BCEWithLogitsLoss=3 L1Loss=4",
    "artifacts.OptimType": "AdamW=1 SGD=2",
}


def attribute_at(path: str) -> object:
    """An attribute of a module or class under onnxruntime.training."""
    parts = path.split(".")
    for count in range(len(parts) - 1, -1, -1):
        try:
            value: object = importlib.import_module(".".join([TRAINING, *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    raise AssertionError(path)


@pytest.mark.parametrize("module", NAMES)
def test_every_module_has_its_names(module: str) -> None:
    name = f"{TRAINING}.{module}" if module else TRAINING
    loaded = importlib.import_module(name)
    assert loaded.__name__ == name
    for each in NAMES[module].split():
        assert hasattr(loaded, each), f"{name} has no {each}"


@pytest.mark.parametrize("path", SIGNATURES)
def test_signatures(path: str) -> None:
    parameters = inspect.signature(attribute_at(path)).parameters.values()
    given = {p.name: p.default for p in parameters}
    expected = SIGNATURES[path]
    assert list(given)[: len(expected)] == list(expected)
    for name, default in expected.items():
        assert given[name] == default, f"{path}({name}=)"
    # Later additions are keyword-only and optional.
    for parameter in list(parameters)[len(expected) :]:
        assert parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) or path.startswith("artifacts")
        assert parameter.kind is parameter.VAR_KEYWORD or parameter.default is not REQUIRED


@pytest.mark.parametrize("path", ENUMS)
def test_enums(path: str) -> None:
    assert " ".join(f"{member.name}={member.value}" for member in attribute_at(path)) == ENUMS[path]


def test_constants() -> None:
    ortmodule = attribute_at("ortmodule")
    assert (ortmodule.ONNX_OPSET_VERSION, ortmodule.MINIMUM_RUNTIME_PYTORCH_VERSION_STR) == (17, "1.8.1")
    assert ortmodule.ORTMODULE_FALLBACK_POLICY == 8 | 16 | 32 | 64
    assert ortmodule.ORTMODULE_FALLBACK_RETRY is False
    assert ortmodule.ORTMODULE_IS_DETERMINISTIC is False
    assert attribute_at("is_ortmodule_available")() is True
    assert attribute_at("has_collective_ops")() is False
    assert attribute_at("is_torch_interop_default_on")() is True
    assert isinstance(attribute_at("is_triton_enabled")(), bool)


def test_error_types() -> None:
    fallback = attribute_at("ortmodule._fallback")
    for name in ("Init", "Device", "TorchModel", "ONNXModel"):
        assert issubclass(getattr(fallback, f"ORTModule{name}Exception"), fallback.ORTModuleFallbackException)
    assert issubclass(fallback.ORTModuleIOError, fallback.ORTModuleFallbackException)
    assert fallback.ORTModuleFallbackException is errors.ORTModuleFallbackException
    load_from_json = attribute_at("ortmodule.experimental.json_config.load_from_json")
    assert attribute_at("ortmodule.experimental.json_config.JSON_PATH_ENVIRONMENT_KEY") == "ORTMODULE_JSON_CONFIG_PATH"
    with pytest.raises(ValueError, match="No JSON file"):
        load_from_json(None)


@pytest.mark.parametrize("name", ["aot_ort", "dynamic_aot_ort", "ort"])
def test_the_backends_of_torch_compile(name: str) -> None:
    import torch

    from onnxtrain.frontend import dynamo

    torch.compiler.reset()
    dynamo._ENGINES.clear()
    model = torch.nn.Linear(3, 2)
    compiled, x = torch.compile(model, backend=attribute_at(f"torchdynamo.register_backend.{name}")), torch.randn(4, 3)
    assert torch.equal(compiled(x), model(x))
    assert dynamo.captures() == 1


def test_settings_of_the_removed_trainer_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("onnxtrain.log._logged", set())
    assert attribute_at("TrainingParameters")(world_size=2).world_size == 2
    assert "TrainingParameters has no effect" in caplog.text


def test_backend_settings_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    attribute_at("torchdynamo.ort_backend.OrtBackend")("CUDAExecutionProvider", preallocate_output=True)
    assert "OrtBackend(ep='CUDAExecutionProvider') has no effect" in caplog.text
    assert "preallocate_output=True) has no effect" in caplog.text


def test_a_backend_compares_with_pytorch() -> None:
    import torch

    class Wrong(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    torch.compiler.reset()
    backend = attribute_at("torchdynamo.ort_backend.OrtBackend")()
    assert not backend.assert_allclose_to_baseline
    backend.assert_allclose_to_baseline = True
    model, x = torch.nn.BatchNorm1d(3), torch.randn(4, 3)
    compiled = torch.compile(model, backend=backend)
    assert_matches(compiled(x), torch.nn.BatchNorm1d(3), x)
    assert model.num_batches_tracked == 1
    dynamo_backend = importlib.import_module("onnxtrain.dropin.dynamo_backend")
    with pytest.raises(RuntimeError, match="differ from those of PyTorch"):
        dynamo_backend._compare(Wrong()(x), x)


def test_options_of_the_former_backend_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Among them the exporter's registry of operators, which PyTorch has removed."""
    import torch

    options = {
        "preferred_execution_providers": ["CPUExecutionProvider"],
        "infer_execution_providers": True,
        "default_execution_providers": ["CUDAExecutionProvider"],
        "preallocate_output": True,
        "use_aot_autograd": True,
        "export_options": {"dynamic_shapes": True, "onnx_registry": None},
        "ort_session_options": onnxruntime.SessionOptions(),
        "pre_ort_model_transforms": [print],
    }
    torch.compiler.reset()
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="onnxtrain", options={**options, "rng": "torch"})
    compiled(torch.randn(4, 3)).sum().backward()
    for name in options:
        (line,) = [
            record.message for record in caplog.records if f"The option {name} has no effect: " in record.message
        ]
        assert len(line.partition(" has no effect: ")[2]) > 20  # the reason


def test_a_traced_graph_becomes_an_onnx_model() -> None:
    import torch

    from onnxtrain.testing import assert_no_worse_than_eager

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.relu(x @ y) + 1)

    feeds = torch.randn(2, 3), torch.randn(3, 4)
    graph = torch.jit.trace(function, feeds).graph
    before = str(graph)
    model = attribute_at("experimental.exporter._export_jit_graph_to_onnx_model_proto")(graph, 0)
    assert str(graph) == before
    session = onnxruntime.InferenceSession(model)
    names = [value.name for value in session.get_inputs()]
    (result,) = session.run(None, {name: feed.numpy() for name, feed in zip(names, feeds, strict=True)})
    exact = function(*(feed.double() for feed in feeds))
    assert_no_worse_than_eager("result", torch.from_numpy(result), function(*feeds), exact)
    svd = torch.jit.trace(torch.linalg.svdvals, feeds[:1]).graph
    with pytest.raises(torch.onnx.OnnxExporterError, match="linalg_svdvals"):
        attribute_at("experimental.exporter._export_jit_graph_to_onnx_model_proto")(svd, 0)


def test_onnxruntime_itself_stays_the_stock_package() -> None:
    assert onnxruntime.InferenceSession.__module__.startswith("onnxruntime.capi")
    assert onnxtrain.dropin.__file__ != onnxruntime.__file__
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{TRAINING}.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("onnxruntime.no_such_module")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{TRAINING}_api")


def test_a_pickled_module_can_be_loaded() -> None:
    import torch

    model = attribute_at("ortmodule.ORTModule")(torch.nn.Linear(2, 1))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(model(torch.ones(1, 2)), again(torch.ones(1, 2)))


def test_onnxruntime_training_requires_the_import() -> None:
    code = "import onnxtrain, onnxruntime\ntry: import onnxruntime.training\nexcept ModuleNotFoundError: print('none')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "none\n"


def test_another_onnxruntime_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = importlib.import_module("onnxtrain.dropin.finder")
    assert finder._Finder in sys.meta_path
    finder.install()  # a second time changes nothing
    assert sys.meta_path.count(finder._Finder) == 1
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f is not finder._Finder])
    monkeypatch.setitem(sys.modules, TRAINING, importlib.import_module("json"))
    with pytest.raises(ImportError, match=r"already imported from .*json"):
        finder.install()
    monkeypatch.delitem(sys.modules, TRAINING)
    monkeypatch.setattr(finder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'onnxtrain\[ort\]'"):
        finder.install()


def test_the_training_api_needs_no_torch() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\nimport onnxtrain.dropin\n"
        "from onnxruntime.training.api import CheckpointState, Module, Optimizer\nimport onnxruntime.training\n"
        "print(onnxruntime.training.api.Module is Module)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
