"""The names of `onnxruntime.training` that onnxtrain does not have, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

_NO_EXTENSIONS = "nothing: onnxtrain has no extensions to build or load"
_OPERATOR = "an operator of `torch.library.triton_op`, called in forward"
_SEED = "`torch.manual_seed`: nothing overrides it"
_EXPORTING = "`torch.compiler.is_compiling`, which is true while forward is captured"

# By path below onnxruntime.training. A module stands for all of its names and submodules.
MODULES: Mapping[str, str] = {
    "ort_triton.kernel": "PyTorch's operators: Inductor writes their kernels",
    "ort_triton.triton_op_executor": _OPERATOR,
    "ortmodule.torch_cpp_extensions.cpu": _NO_EXTENSIONS,
    "ortmodule.torch_cpp_extensions.cuda": _NO_EXTENSIONS,
}
REMOVED: Mapping[str, str] = {
    **MODULES,
    "artifacts.USE_PATH_THRESHOLD": "the path of a model above 2 GB as the argument of `generate_artifacts`",
    "onnxblock.optim.optim.AdamWOptimizer": "`onnxblock.optim.AdamW`, which takes the parameters",
    "onnxblock.optim.optim.SGDOptimizer": "`onnxblock.optim.SGD`, which takes the parameters",
    "ort_triton.call_triton_by_name": _OPERATOR,
    "ort_triton.call_triton_by_onnx": _OPERATOR,
    "ort_triton.get_config": "nothing: Inductor chooses what to fuse",
    "ort_triton.register_triton_op_executor": _OPERATOR,
    "ort_triton.run_once_register_triton_op_executor": _OPERATOR,
    "ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT": _EXPORTING,
    "ortmodule.export_context": _EXPORTING,
    "ortmodule.ort_info": "`onnxruntime.capi.build_and_package_info`",
    "ortmodule.override_torch_cuda_manual_seed": _SEED,
    "ortmodule.override_torch_manual_seed": _SEED,
    "ortmodule.torch_cuda_manual_seed": "`torch.cuda.manual_seed`: nothing overrides it",
    "ortmodule.torch_manual_seed": _SEED,
    "ortmodule.wrap_exception": "`raise ORTModuleFallbackException(...) from error`",
    "ortmodule.ortmodule.T": "a `typing.TypeVar`",
    "utils.hooks.merge_activation_summary.generate_summaries_per_step": "`python -m "
    "onnxtrain.observe.hooks.merge_activation_summary`",
    "utils.hooks.merge_activation_summary.logger": "`logging.getLogger('onnxtrain')`",
    "utils.hooks.merge_activation_summary.parse_arguments": "`python -m "
    "onnxtrain.observe.hooks.merge_activation_summary`",
}


def message(path: str) -> str | None:
    """Return what to tell a user of a removed name or module; None if onnxtrain has it or never had."""
    instead = REMOVED.get(path)
    if instead is None:
        return None
    return f"onnxruntime.training.{path} is not part of onnxtrain. Use instead: {instead}."
