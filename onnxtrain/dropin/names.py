"""List the names of `onnxruntime.training`, by module: where each is now."""

from __future__ import annotations

from collections.abc import Mapping

# For each module: the names that it has from each module of onnxtrain, separated by spaces. "*" stands for all public
# names, and "a=b" for the name b as a.
MODULES: Mapping[str, Mapping[str, str]] = {
    "": {
        "onnxtrain": "ORTModule",
        "onnxtrain.dropin.legacy": "PropagateCastOpsStrategy TrainingParameters is_ortmodule_available "
        "is_torch_interop_default_on is_triton_enabled set_seed",
        "onnxtrain.optim": "TrainStepInfo",
        "onnxruntime.capi._pybind_state": "has_collective_ops",
    },
    "amp": {"onnxtrain.optim": "DynamicLossScaler LossScaler"},
    "amp.loss_scaler": {"onnxtrain.optim": "DynamicLossScaler LossScaler"},
    "api": {"onnxtrain.api": "*"},
    "api.checkpoint_state": {"onnxtrain.api": "CheckpointState Parameter Parameters Properties"},
    "api.lr_scheduler": {"onnxtrain.api": "LinearLRScheduler"},
    "api.module": {"onnxtrain.api": "Module"},
    "api.optimizer": {"onnxtrain.api": "Optimizer"},
    "artifacts": {"onnxtrain.artifacts": "LossType OptimType generate_artifacts"},
    "experimental": {"onnxtrain.device.gradient_graph": "export_gradient_graph"},
    "experimental.exporter": {
        "onnxtrain.dropin.jit_graph": "_export_jit_graph_to_onnx_model_proto=export_jit_graph_to_onnx_model_proto"
    },
    "experimental.gradient_graph": {"onnxtrain.device.gradient_graph": "export_gradient_graph"},
    "onnxblock": {"onnxtrain.onnxblock": "*", "onnxtrain.dropin.model_accessor": "base empty_base"},
    "onnxblock.blocks": {"onnxtrain.onnxblock.blocks": "*"},
    "onnxblock.checkpoint_utils": {"onnxtrain.onnxblock": "load_checkpoint_to_model save_checkpoint"},
    "onnxblock.loss": {"onnxtrain.onnxblock.loss": "*"},
    "onnxblock.loss.loss": {"onnxtrain.onnxblock.loss": "*"},
    "onnxblock.model_accessor": {
        "onnxtrain.onnxblock": "custom_op_library",
        "onnxtrain.dropin.model_accessor": "ModelAccessor base empty_base",
    },
    "onnxblock.onnxblock": {"onnxtrain.onnxblock": "ForwardBlock TrainingBlock"},
    "onnxblock.optim": {"onnxtrain.onnxblock.optim": "*"},
    "onnxblock.optim.optim": {"onnxtrain.onnxblock.optim": "*"},
    "optim": {
        "onnxtrain.optim": "AdamConfig AdamWMode ConstantWarmupLRScheduler CosineWarmupLRScheduler FP16_Optimizer "
        "FusedAdam LambConfig LinearWarmupLRScheduler PolyWarmupLRScheduler SGDConfig"
    },
    "optim.config": {"onnxtrain.optim": "AdamConfig LambConfig SGDConfig"},
    "optim.fp16_optimizer": {"onnxtrain.optim": "FP16_Optimizer"},
    "optim.fused_adam": {"onnxtrain.optim": "AdamWMode FusedAdam"},
    "optim.lr_scheduler": {
        "onnxtrain.optim": "ConstantWarmupLRScheduler CosineWarmupLRScheduler LinearWarmupLRScheduler "
        "PolyWarmupLRScheduler"
    },
    "ort_triton": {"onnxtrain.dropin.legacy": "register_triton_kernel"},
    "ortmodule._custom_autograd_function": {"onnxtrain.dropin.legacy": "enable_custom_autograd_support"},
    "ortmodule._fallback": {
        "onnxtrain.errors": "ORTModuleDeviceException ORTModuleFallbackException ORTModuleIOError "
        "ORTModuleInitException ORTModuleONNXModelException ORTModuleTorchModelException",
        "onnxtrain.options": "_FallbackPolicy=FallbackPolicy",
    },
    "ortmodule._fallback_exceptions": {
        "onnxtrain.errors": "ORTModuleDeviceException ORTModuleFallbackException ORTModuleIOError "
        "ORTModuleInitException ORTModuleONNXModelException ORTModuleTorchModelException",
    },
    "ortmodule.experimental.hierarchical_ortmodule": {
        "onnxtrain.frontend.hierarchical_module": "HierarchicalORTModule"
    },
    "ortmodule.experimental.json_config": {
        "onnxtrain.dropin.legacy": "load_from_json",
        "onnxtrain.options": "JSON_PATH_ENVIRONMENT_KEY=JSON_VARIABLE",
    },
    "ortmodule.experimental.pipe": {"onnxtrain.distributed.pipeline": "ORTPipelineModule"},
    "ortmodule.graph_optimizer_registry": {
        "onnxtrain.dropin.legacy": "GraphOptimizerRegistry",
        "onnxtrain.passes.user_graph_optimizers": "register_graph_optimizer",
    },
    "ortmodule.graph_optimizers.utils": {
        "onnxtrain.dropin.graph_matcher": "GraphMatcher check_attribute_value make_constant_node update_graph"
    },
    "ortmodule.options": {"onnxtrain": "DebugOptions LogLevel", "onnxtrain.options": "_SkipCheck=SkipCheck"},
    "ortmodule.torch_cpp_extensions": {"onnxtrain.dropin.legacy": "is_installed"},
    "ortmodule.ortmodule": {"onnxtrain": "ORTModule"},
    "torchdynamo.ort_backend": {"onnxtrain.dropin.dynamo_backend": "OrtBackend"},
    "torchdynamo.register_backend": {
        "onnxtrain.dropin.dynamo_backend": "DEFAULT_BACKEND aot_ort=DEFAULT_BACKEND dynamic_aot_ort=DEFAULT_BACKEND "
        "make_aot_ort ort=DEFAULT_BACKEND"
    },
    "utils": {
        "onnxtrain.dropin.dtypes": "onnx_dtype_to_pytorch_dtype pytorch_scalar_type_to_pytorch_dtype "
        "pytorch_type_to_onnx_dtype",
        "onnxtrain.dropin.ptable": "PTable",
        "onnxtrain.dropin.structures": "ORTModelInputOutputSchemaType ORTModelInputOutputType PrimitiveType "
        "extract_data_and_schema unflatten_data_using_schema",
        "onnxtrain.observe.memory": "log_memory_usage",
        "onnxtrain.observe.nvtx": "nvtx_function_decorator torch_nvtx_range_pop torch_nvtx_range_push",
    },
    "utils.data": {
        "onnxtrain.distributed.load_balancing": "LoadBalancingDistributedBatchSampler LoadBalancingDistributedSampler"
    },
    "utils.data.sampler": {
        "onnxtrain.dropin.legacy": "shard_wrapped_indices_for_worker",
        "onnxtrain.distributed.load_balancing": "LoadBalancingDistributedBatchSampler LoadBalancingDistributedSampler",
    },
    "utils.hooks": {"onnxtrain.observe.hooks": "*"},
    "utils.ptable": {"onnxtrain.dropin.ptable": "PTable Row"},
    "utils.torch_io_helper": {
        "onnxtrain.dropin.structures": "ORTModelInputOutputSchemaType ORTModelInputOutputType PrimitiveType "
        "extract_data_and_schema unflatten_data_using_schema"
    },
    "utils.torch_profile_utils": {
        "onnxtrain.observe.memory": "log_memory_usage",
        "onnxtrain.observe.nvtx": "nvtx_function_decorator torch_nvtx_range_pop torch_nvtx_range_push",
    },
    "utils.torch_type_map": {
        "onnxtrain.dropin.dtypes": "onnx_dtype_to_pytorch_dtype pytorch_scalar_type_to_pytorch_dtype "
        "pytorch_type_to_onnx_dtype"
    },
}

# Modules that are a file of onnxtrain, run under the former name.
FILES: Mapping[str, str] = {
    "ortmodule": "dropin/ortmodule.py",
    "ortmodule.torch_cpp_extensions.install": "dropin/install.py",
    "utils.hooks.merge_activation_summary": "observe/hooks/merge_activation_summary.py",
}
