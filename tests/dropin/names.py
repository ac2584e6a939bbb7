"""The public names of ONNX Runtime Training and what became of each; `python -m tests.dropin.names` writes the table.

A name that is in no mapping works as it did. `CALLS` uses what can be called in a moment, and `TESTS` names the test
file of each of the others: together they have every name.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from onnxtrain.dropin.removed import REMOVED
from tests.dropin.test_surface import NAMES, TRAINING, attribute_at

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migration.md"
BEGIN, END = "<!-- names: written by python -m tests.dropin.names -->\n", "<!-- names: end -->\n"

DIFFERS = {
    "PropagateCastOpsStrategy": "names only: casts stay where autocast inserts them; the JSON key is logged",
    "TrainingParameters": "a warning says that nothing reads its values: its trainer was removed before the last "
    "release",
    "has_collective_ops": "always False: collectives are PyTorch's",
    "is_triton_enabled": "whether the installed torch has Triton; kernels come from Inductor",
    "set_seed": "also seeds PyTorch, from whose generators ORTModule samples",
    "ortmodule.set_seed": "as `set_seed`",
    "ortmodule.ORTMODULE_IS_DETERMINISTIC": "assigning True turns on "
    "`torch.use_deterministic_algorithms(True, warn_only=True)`",
    "ortmodule.ORTMODULE_TORCH_CPP_DIR": "assigning it raises a warning: there are no extensions to build",
    "ortmodule.MINIMUM_RUNTIME_PYTORCH_VERSION_STR": "assigning it raises a warning; see the README for versions",
    "ortmodule.options._SkipCheck": "every call is checked; skipping is logged as having no effect",
    "ortmodule.torch_cpp_extensions.install.build_torch_cpp_extensions": "prints that there is nothing to build",
    "ortmodule.torch_cpp_extensions.is_installed": "always True: there are no extensions to build",
    "ortmodule.is_torch_cpp_extensions_installed": "always True: there are no extensions to build",
    "ortmodule.DebugOptions": "`torch_exporter_filter` and `onnxruntime_log_filter` list messages that do not occur",
    "optim.FusedAdam": "also on a CPU, in float64 and bfloat16",
    "utils.hooks.configure_ort_compatible_zero_stage3": "`debug=True` writes statistics; else a warning says that "
    "modules run as graphs under ZeRO stage 3 as they are",
    "utils.hooks.ZeROOffloadSubscriber": "a warning says that it changes nothing: DeepSpeed's own hooks gather and "
    "release parameters",
    "torchdynamo.ort_backend.OrtBackend": "a graph runs on the device of its tensors, and PyTorch allocates the "
    "outputs: a given `ep` or `preallocate_output` is logged as ignored",
    "torchdynamo.register_backend.make_aot_ort": "a graph serves all sizes, also without `dynamic`",
    "onnxblock.optim.ClipGradNorm": "returns new gradients and does not modify its inputs",
    "artifacts.generate_artifacts": "`ort_format` is refused: convert with the device's version of onnxruntime; the "
    "optimizer graph has an input for each tensor instead of sequences",
}
NEEDS_DEEPSPEED = {
    "ortmodule.experimental.pipe.ORTPipelineModule": "without DeepSpeed the import says that it is needed, as before",
}
GONE = {
    "ort_triton.register_triton_kernel": "define an operator with `torch.library.triton_op`, and call it in forward",
}


def _a_module(wrap: Callable[..., torch.nn.Module]) -> None:
    wrap(torch.nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()


def _an_optimizer(make: Callable[..., Any]) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    make([parameter]).step()
    assert (parameter < 1).all()


def _a_schedule(make: Callable[..., Any]) -> None:
    step_info = attribute_at("TrainStepInfo")(attribute_at("optim").AdamConfig(lr=1.0), optimization_step=50)
    assert 0 < make(total_steps=100).get_lr(step_info)[0] <= 1


_OF_TWO = ("Add", "Sub", "Mul", "Div")


def _blocks(make: Callable[..., Any]) -> None:
    onnxblock = attribute_at("onnxblock")
    with onnxblock.empty_base() as model:
        make()(*[onnxblock.blocks.Constant(2.0)() for _ in range(2 if make.__name__ in _OF_TWO else 1)])
        assert model.model.graph.node or model.model.graph.initializer


def _an_exception(make: Callable[[str], Exception]) -> None:
    with pytest.raises(attribute_at("ortmodule._fallback").ORTModuleFallbackException, match="a reason"):
        raise make("a reason")


def _a_loss(make: Callable[[], Any]) -> None:
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [])
    graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [2, 3]))
    with attribute_at("onnxblock").base(onnx.helper.make_model(graph)):
        assert make()("y")


CALLS: dict[str, Callable[[Any], object]] = {
    "is_ortmodule_available": lambda f: f() or sys.exit(),
    "has_collective_ops": lambda f: f(),
    "is_triton_enabled": lambda f: f(),
    "is_torch_interop_default_on": lambda f: f(),
    "set_seed": lambda f: f(0),
    "ORTModule": _a_module,
    "ortmodule.ORTModule": _a_module,
    "ortmodule.ortmodule.ORTModule": _a_module,
    "ortmodule.experimental.hierarchical_ortmodule.HierarchicalORTModule": _a_module,
    "ortmodule.DebugOptions": lambda f: f().onnxruntime_log_filter[0],
    "ortmodule.register_graph_optimizer": lambda f: f(target_modules="none of this name")(lambda graph: None),
    "optim.FusedAdam": _an_optimizer,
    "optim.fused_adam.FusedAdam": _an_optimizer,
    "optim.lr_scheduler.ConstantWarmupLRScheduler": _a_schedule,
    "optim.lr_scheduler.CosineWarmupLRScheduler": _a_schedule,
    "optim.lr_scheduler.LinearWarmupLRScheduler": _a_schedule,
    "optim.lr_scheduler.PolyWarmupLRScheduler": _a_schedule,
    "amp.LossScaler": lambda f: f(8.0).loss_scale,
    "amp.DynamicLossScaler": lambda f: f().reset(),
    "utils.extract_data_and_schema": lambda f: f({"a": [torch.ones(1), None]}),
    "utils.torch_nvtx_range_push": lambda f: f("range"),
    "utils.torch_nvtx_range_pop": lambda f: f(),
    "utils.nvtx_function_decorator": lambda f: f(lambda: 1)(),
    "utils.log_memory_usage": lambda f: f("phase"),
    "utils.pytorch_type_to_onnx_dtype": lambda f: f(torch.float32),
    "utils.pytorch_scalar_type_to_pytorch_dtype": lambda f: f("Float"),
    "utils.PTable": lambda f: f().get_string(),
    "utils.hooks.StatisticsSubscriber": lambda f: f(tempfile.mkdtemp(), override_output_dir=True),
    "utils.data.LoadBalancingDistributedSampler": lambda f: list(f(["a", "bb"], len, world_size=1, rank=0)),
    "optim.SGDConfig": lambda f: f(lr=0.1),
    "optim.AdamConfig": lambda f: f(lr=0.1, alpha=0.8),
    "optim.LambConfig": lambda f: f(lr=0.1, ratio_max=2.0),
    "utils.data.LoadBalancingDistributedBatchSampler": lambda f: list(
        f(
            attribute_at("utils.data").LoadBalancingDistributedSampler(["a", "bb"], len, world_size=1, rank=0),
            lambda each: [each],
        )
    ),
    "ortmodule._fallback.ORTModuleFallbackException": _an_exception,
    "ortmodule._fallback.ORTModuleInitException": _an_exception,
    "ortmodule._fallback.ORTModuleDeviceException": _an_exception,
    "ortmodule._fallback.ORTModuleIOError": _an_exception,
    "ortmodule._fallback.ORTModuleTorchModelException": _an_exception,
    "ortmodule._fallback.ORTModuleONNXModelException": _an_exception,
    "onnxblock.loss.MSELoss": _a_loss,
    "onnxblock.loss.BCEWithLogitsLoss": _a_loss,
    "onnxblock.loss.L1Loss": _a_loss,
    "onnxblock.blocks.Pow": lambda f: _blocks(lambda: f(2.0)),
    "onnxblock.blocks.Clip": lambda f: _blocks(lambda: f(0.0, 1.0)),
    "onnxblock.blocks.Cast": lambda f: _blocks(lambda: f(7)),
    "onnxblock.blocks.Add": _blocks,
    "onnxblock.blocks.Sub": _blocks,
    "onnxblock.blocks.Mul": _blocks,
    "onnxblock.blocks.Div": _blocks,
    "onnxblock.blocks.Sigmoid": _blocks,
    "onnxblock.blocks.Log": _blocks,
    "onnxblock.blocks.Neg": _blocks,
    "onnxblock.blocks.Abs": _blocks,
    "onnxblock.blocks.ReduceMean": _blocks,
    "onnxblock.blocks.ReduceSum": _blocks,
    "onnxblock.blocks.PassThrough": _blocks,
}


# The test files of what takes more than a call.
TESTS: dict[str, tuple[str, ...]] = {
    "dropin/test_surface.py": (
        "PropagateCastOpsStrategy",
        "ortmodule.LogLevel",
        "ortmodule.options._SkipCheck",
        "ortmodule._fallback._FallbackPolicy",
        "optim.AdamWMode",
        "artifacts.LossType",
        "artifacts.OptimType",
        "TrainingParameters",
        "utils.PrimitiveType",
        "utils.ORTModelInputOutputType",
        "utils.ORTModelInputOutputSchemaType",
        "torchdynamo.register_backend.DEFAULT_BACKEND",
        "ortmodule.ONNX_OPSET_VERSION",
        "ortmodule.ORTMODULE_FALLBACK_POLICY",
        "ortmodule.MINIMUM_RUNTIME_PYTORCH_VERSION_STR",
        "ortmodule.ORTMODULE_FALLBACK_RETRY",
        "ortmodule.ORTMODULE_IS_DETERMINISTIC",
        "ortmodule.experimental.json_config.load_from_json",
        "ortmodule.experimental.json_config.JSON_PATH_ENVIRONMENT_KEY",
        "torchdynamo.register_backend.aot_ort",
        "torchdynamo.register_backend.dynamic_aot_ort",
        "torchdynamo.register_backend.ort",
        "torchdynamo.register_backend.make_aot_ort",
        "torchdynamo.ort_backend.OrtBackend",
        "experimental.exporter._export_jit_graph_to_onnx_model_proto",
    ),
    "dropin/test_settings.py": (
        "ortmodule.ORTMODULE_TORCH_CPP_DIR",
        "ortmodule._custom_autograd_function.enable_custom_autograd_support",
    ),
    "dropin/test_names.py": ("ort_triton.register_triton_kernel",),
    "dropin/test_wheel_names.py": (
        "onnxblock.model_accessor.ModelAccessor",
        "onnxblock.base",
        "onnxblock.empty_base",
        "ortmodule.ONNXRUNTIME_CUDA_VERSION",
        "ortmodule.ONNXRUNTIME_ROCM_VERSION",
        "ortmodule.graph_optimizer_registry.GraphOptimizerRegistry",
        "ortmodule.torch_cpp_extensions.install.build_torch_cpp_extensions",
        "ortmodule.torch_cpp_extensions.is_installed",
        "utils.data.sampler.shard_wrapped_indices_for_worker",
        "utils.ptable.Row",
    ),
    "dropin/test_helpers_of_scripts.py": (
        "utils.unflatten_data_using_schema",
        "utils.onnx_dtype_to_pytorch_dtype",
    ),
    "device/test_api_training.py": (
        "api.CheckpointState",
        "api.Module",
        "api.Optimizer",
        "api.LinearLRScheduler",
        "artifacts.generate_artifacts",
    ),
    "device/test_api.py": (
        "api.checkpoint_state.Parameter",
        "api.checkpoint_state.Parameters",
        "api.checkpoint_state.Properties",
    ),
    "device/test_artifacts_blocks.py": (
        "onnxblock.TrainingBlock",
        "onnxblock.ForwardBlock",
        "onnxblock.save_checkpoint",
        "onnxblock.load_checkpoint_to_model",
        "onnxblock.Block",
        "onnxblock.blocks.Constant",
        "onnxblock.blocks.ReduceAllL2",
        "onnxblock.blocks.InputLike",
        "onnxblock.blocks.Linear",
        "onnxblock.blocks.LabelEncoder",
        "onnxblock.blocks.SequenceConstruct",
        "onnxblock.loss.CrossEntropyLoss",
        "onnxblock.custom_op_library",
        "onnxblock.optim.ClipGradNorm",
    ),
    "device/test_old_blocks.py": (
        "onnxblock.optim.AdamW",
        "onnxblock.optim.SGD",
    ),
    "device/test_gradient_graph.py": ("experimental.export_gradient_graph",),
    "compile/test_user_graph_optimizers.py": (
        "ortmodule.graph_optimizers.utils.GraphMatcher",
        "ortmodule.graph_optimizers.utils.check_attribute_value",
        "ortmodule.graph_optimizers.utils.make_constant_node",
        "ortmodule.graph_optimizers.utils.update_graph",
    ),
    "optim/test_fp16_optimizer.py": ("optim.FP16_Optimizer",),
    "observe/test_hooks.py": (
        "utils.hooks.SubscriberManager",
        "utils.hooks.GlobalSubscriberManager",
        "utils.hooks.SubscriberBase",
        "utils.hooks.inspect_activation",
        "utils.hooks.ZeROOffloadSubscriber",
        "utils.hooks.configure_ort_compatible_zero_stage3",
    ),
}


def paths() -> list[str]:
    """Every public name, as a path below onnxruntime.training."""
    return [".".join(filter(None, (module, name))) for module, names in NAMES.items() for name in names.split() or [""]]


def table() -> str:
    """The table in Markdown: a row for each module, and one for each name that differs or was removed."""
    rows = [f"The names are relative to `{TRAINING}`.", "", "| module | names that work as before |", "|---|---|"]
    for module, names in NAMES.items():
        same = [name for name in names.split() if ".".join(filter(None, (module, name))) not in {**DIFFERS, **GONE}]
        if same:
            rows.append(f"| `{module or TRAINING}` | {', '.join(f'`{name}`' for name in same)} |")
    rows += [
        "",
        "| name | difference |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in {**DIFFERS, **NEEDS_DEEPSPEED}.items()),
    ]
    rows += [
        "",
        "| removed name | alternative |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in {**GONE, **REMOVED}.items()),
    ]
    return "\n".join([*rows, ""])


def written() -> tuple[str, str, str]:
    """The page before, in and after the table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


if __name__ == "__main__":
    before, _, after = written()
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}")
