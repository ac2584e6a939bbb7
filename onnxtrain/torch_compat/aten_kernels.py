"""Access ATen kernels without a public name, each with a formula as its fallback.

At first use a kernel's schema is compared with the expected one: another order of arguments in a later PyTorch is
detected before it leads to a wrong result. `agrees` compares the kernel with its formula on a few elements. Only the
tests run it, on each version of PyTorch, because running a kernel at import would start PyTorch's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal, missing

Tensor = torch.Tensor
_ATEN = torch.ops.aten


def _ramp(*shape: int) -> Tensor:
    """Return a few small values, without using a random generator."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1.0, 1.5, count, dtype=torch.float32).reshape(shape)


def has_schema(overload: str, arguments: str, results: int = 1) -> Callable[[Any], bool]:
    """Make a check of an operator's schema; the other arguments must have defaults.

    Args:
        overload: "name" for the default overload, or "name.overload".
        arguments: the names of the first arguments, separated by spaces.
        results: the number of results.
    """

    def check(part: Any) -> bool:
        packet, _, name = overload.partition(".")
        schema = getattr(
            getattr(_ATEN if hasattr(_ATEN, packet) else torch.ops.mkldnn, packet), name or "default"
        )._schema
        names = arguments.split()
        return (
            [a.name for a in schema.arguments[: len(names)]] == names
            and all(a.has_default_value() or a.kwarg_only for a in schema.arguments[len(names) :])
            and len(schema.returns) == results
        )

    return check


def _agrees(kernel: Callable[..., Any], formula: Callable[..., Any], *arguments: Any) -> bool:
    with torch.no_grad():
        results, expected = kernel(*arguments), formula(*arguments)
    pairs = zip(results, expected, strict=True) if isinstance(expected, tuple) else [(results, expected)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


# Softmax


def _softmax_grad(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, *, grad_input: Tensor | None = None) -> Tensor:
    dx = (dy - (dy * y).sum(dim, keepdim=True)) * y
    return dx.to(dtype) if grad_input is None else grad_input.copy_(dx)


def _log_softmax_grad(dy: Tensor, y: Tensor, dim: int, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    dx = dy - y.exp() * dy.sum(dim, keepdim=True)
    return dx.to(dtype) if out is None else out.copy_(dx)


def _probabilities() -> Tensor:
    return _ramp(2, 3).softmax(-1)


softmax_grad = Internal[Callable[..., Tensor]](
    "softmax_grad",
    lambda: torch._softmax_backward_data,
    why="computes softmax's gradient from its result in one kernel",
    fallback=_softmax_grad,
    cost="softmax's gradient takes three kernels instead of one",
    check=has_schema("_softmax_backward_data", "grad_output output dim input_dtype"),
    agrees=lambda part: _agrees(part, _softmax_grad, _ramp(2, 3), _probabilities(), 1, torch.float32),
).get()

log_softmax_grad = Internal[Callable[..., Tensor]](
    "log_softmax_grad",
    lambda: torch._log_softmax_backward_data,
    why="computes log_softmax's gradient from its result in one kernel",
    fallback=_log_softmax_grad,
    cost="log_softmax's gradient takes three kernels instead of one",
    check=has_schema("_log_softmax_backward_data", "grad_output output dim input_dtype"),
    agrees=lambda part: _agrees(part, _log_softmax_grad, _ramp(2, 3), _probabilities().log(), 1, torch.float32),
).get()


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    y = torch.softmax(x, dim, dtype)
    return y.masked_fill((x == -torch.inf).all(dim, keepdim=True), 0.0)


safe_softmax = Internal[Callable[..., Tensor]](
    "safe_softmax",
    lambda: _ATEN._safe_softmax.default,
    why="returns 0 for a row of -inf, as the softmax of attention does",
    fallback=_safe_softmax,
    cost="such a softmax takes two more kernels",
    check=has_schema("_safe_softmax", "self dim"),
    agrees=lambda part: _agrees(part, _safe_softmax, torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]), 1),
).get()

# Activations


def _prelu(x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x > 0, x, slope * x)


def _prelu_grad(dy: Tensor, x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(x > 0, dy, slope * dy), torch.where(x > 0, 0.0, x * dy)


prelu = Internal[Callable[..., Tensor]](
    "prelu",
    lambda: _ATEN._prelu_kernel.default,
    why="torch.prelu takes only slopes per channel; ONNX's broadcast",
    fallback=_prelu,
    cost="PReLU takes three kernels instead of one",
    check=has_schema("_prelu_kernel", "self weight"),
    agrees=lambda part: _agrees(part, _prelu, _ramp(2, 3), _ramp(2, 3)),
).get()

prelu_grad = Internal[Callable[..., tuple[Tensor, Tensor]]](
    "prelu_grad",
    lambda: _ATEN._prelu_kernel_backward.default,
    why="see prelu",
    fallback=_prelu_grad,
    cost="PReLU's gradient takes six kernels instead of one",
    check=has_schema("_prelu_kernel_backward", "grad_output self weight", 2),
    agrees=lambda part: _agrees(part, _prelu_grad, _ramp(2, 3), _ramp(2, 3), _ramp(2, 3)),
).get()


# Implementations of torch.nn.functional


def _nn_function(name: str) -> Callable[..., Any]:
    """Return the C++ function that a function of torch.nn.functional calls after checking its arguments in Python."""
    return Internal[Callable[..., Any]](
        f"nn.{name}",
        lambda: getattr(torch._C._nn, name),
        why="the function of torch.nn.functional checks its arguments in Python: about a microsecond a call",
        fallback=getattr(_ATEN, name),
        cost=f"each {name} takes about two microseconds longer",
        check=callable,
    ).get()


adaptive_avg_pool2d = _nn_function("adaptive_avg_pool2d")
adaptive_avg_pool3d = _nn_function("adaptive_avg_pool3d")
adaptive_max_pool2d = _nn_function("adaptive_max_pool2d")
adaptive_max_pool3d = _nn_function("adaptive_max_pool3d")
avg_pool2d = _nn_function("avg_pool2d")
avg_pool3d = _nn_function("avg_pool3d")
binary_cross_entropy = _nn_function("binary_cross_entropy")
elu = _nn_function("elu")
glu = _nn_function("glu")
hardsigmoid = _nn_function("hardsigmoid")
hardswish = _nn_function("hardswish")
hardtanh = _nn_function("hardtanh")
huber_loss = _nn_function("huber_loss")
leaky_relu = _nn_function("leaky_relu")
max_pool2d_with_indices = _nn_function("max_pool2d_with_indices")
max_pool3d_with_indices = _nn_function("max_pool3d_with_indices")
mse_loss = _nn_function("mse_loss")
smooth_l1_loss = _nn_function("smooth_l1_loss")
soft_margin_loss = _nn_function("soft_margin_loss")
softplus = _nn_function("softplus")
softshrink = _nn_function("softshrink")

# Attention. If one of these kernels is missing, attention is computed by its formula (`has_cpu_flash`).


def _qkv() -> tuple[Tensor, Tensor, Tensor]:
    q = _ramp(1, 1, 2, 8)
    return q, q + 0.25, q + 0.5


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT * q.size(-1) ** -0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _attention_grads(dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    scale = q.size(-1) ** -0.5
    p = (q @ k.mT * scale).softmax(-1)
    ds = _softmax_grad(dy @ v.mT, p, -1, p.dtype) * scale
    return ds @ k, ds.mT @ q, p.mT @ dy


def _cpu_flash_agrees(kernel: Callable[..., Any]) -> bool:
    return _agrees(lambda *tensors: kernel(*tensors, 0.0, False, attn_mask=None, scale=None), _attention, *_qkv())


def _cpu_flash_grad_agrees(kernel: Callable[..., Any]) -> bool:
    y, logsumexp = _attention(*_qkv())

    def grads(dy: Tensor, *tensors: Tensor) -> Any:
        return tuple(kernel(dy, *tensors, y, logsumexp, 0.0, False, attn_mask=None, scale=None))

    return _agrees(grads, _attention_grads, _qkv()[2], *_qkv())


CPU_FLASH = Internal[Callable[..., Any]](
    "cpu_flash",
    lambda: torch._scaled_dot_product_flash_attention_for_cpu,
    why="returns flash attention's logsumexp, which the public function does not",
    fallback=missing("cpu_flash"),
    cost="attention on CPUs materializes all scores in memory",
    check=has_schema("_scaled_dot_product_flash_attention_for_cpu", "query key value dropout_p is_causal", 2),
    agrees=_cpu_flash_agrees,
)
CPU_FLASH_GRAD = Internal[Callable[..., Any]](
    "cpu_flash_grad",
    lambda: _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    why="the gradient of cpu_flash",
    fallback=missing("cpu_flash_grad"),
    cost="see cpu_flash",
    check=has_schema(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "grad_out query key value out logsumexp dropout_p is_causal",
        3,
    ),
    agrees=_cpu_flash_grad_agrees,
)
SDP_CHOICE = Internal[Callable[..., int]](
    "sdp_choice",
    lambda: torch._fused_sdp_choice,
    why="tells which kernel eager chooses for attention, by sizes, strides and the enabled backends",
    fallback=missing("sdp_choice"),
    cost="see cpu_flash",
    check=has_schema("_fused_sdp_choice", "query key value attn_mask dropout_p is_causal"),
    agrees=lambda part: isinstance(part(*_qkv(), None, 0.0, False, scale=None, enable_gqa=False), int),
)


def has_cpu_flash() -> bool:
    """Return whether this PyTorch has flash attention for CPUs, forward and backward."""
    return CPU_FLASH.is_available and CPU_FLASH_GRAD.is_available and SDP_CHOICE.is_available


def _gpu_attention(
    kind: str, library: str, forward: tuple[str, int], backward: tuple[str, int]
) -> tuple[Internal[Callable[..., Any]], Internal[Callable[..., Any]]]:
    """Define the entries of an attention kernel on a GPU and of its gradient, from their arguments and results."""

    def entry(name: str, why: str, operator: str, schema: tuple[str, int]) -> Internal[Callable[..., Any]]:
        return Internal[Callable[..., Any]](
            name,
            lambda: getattr(_ATEN, operator).default,
            why=why,
            fallback=missing(name),
            cost="attention on a GPU holds all scores in memory",
            check=has_schema(operator, *schema),
        )

    name, operator = f"gpu_{kind}", f"_scaled_dot_product_{kind}_attention"
    return (
        entry(name, f"{library} on a GPU, with its logsumexp and the state of its dropout", operator, forward),
        entry(f"{name}_grad", f"the gradient of {name}", f"{operator}_backward", backward),
    )


gpu_flash, gpu_flash_grad = _gpu_attention(
    "flash",
    "flash attention",
    ("query key value dropout_p is_causal return_debug_mask scale", 9),
    (
        (
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale"
        ),
        3,
    ),
)
gpu_efficient, gpu_efficient_grad = _gpu_attention(
    "efficient",
    "memory-efficient attention",
    ("query key value attn_bias compute_log_sumexp dropout_p is_causal scale", 4),
    (
        (
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale"
        ),
        4,
    ),
)
gpu_cudnn, gpu_cudnn_grad = _gpu_attention(
    "cudnn",
    "cuDNN's attention",
    ("query key value attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask scale", 9),
    (
        (
            "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q "
            "max_k dropout_p is_causal scale"
        ),
        3,
    ),
)


def has_gpu_attention() -> bool:
    """Return whether this PyTorch has all attention kernels for a GPU, and the function that chooses among them."""
    kernels = (gpu_flash, gpu_flash_grad, gpu_efficient, gpu_efficient_grad, gpu_cudnn, gpu_cudnn_grad, SDP_CHOICE)
    return all(kernel.is_available for kernel in kernels)


varlen_flash = Internal[Callable[..., Any]](
    "varlen_flash",
    lambda: _ATEN._flash_attention_forward.default,
    why="computes flash attention over packed sequences on a GPU, with its logsumexp and the state of its dropout",
    fallback=missing("varlen_flash"),
    cost="models whose batches are packed run in PyTorch on a GPU",
    check=has_schema(
        "_flash_attention_forward",
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        5,
    ),
).get()
varlen_flash_grad = Internal[Callable[..., Any]](
    "varlen_flash_grad",
    lambda: _ATEN._flash_attention_backward.default,
    why="the gradient of varlen_flash",
    fallback=missing("varlen_flash_grad"),
    cost="see varlen_flash",
    check=has_schema(
        "_flash_attention_backward",
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused",
        3,
    ),
).get()

# Norms


def _rms_norm(x: Tensor, shape: Sequence[int], scale: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    axes = tuple(range(-len(shape), 0))
    inv_std = (x.float().square().mean(axes, keepdim=True) + epsilon).rsqrt()
    z = (x.float() * inv_std).to(x.dtype)
    return z if scale is None else z * scale, inv_std


def _rms_norm_grad(
    dy: Tensor, x: Tensor, shape: Sequence[int], inv_std: Tensor, scale: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    axes = tuple(range(-len(shape), 0))
    z = x.float() * inv_std
    g = dy.float() if scale is None else dy.float() * scale.float()
    dx = (g - z * (g * z).mean(axes, keepdim=True)) * inv_std if mask[0] else None
    rest = tuple(range(x.dim() - len(shape)))
    dscale = (dy.float() * z).sum(rest) if mask[1] and scale is not None else None
    return None if dx is None else dx.to(x.dtype), None if dscale is None else dscale.to(x.dtype)


fused_rms_norm = Internal[Callable[..., Any]](
    "fused_rms_norm",
    lambda: torch._fused_rms_norm,
    why="computes RMSNorm and the inverse of its root in one kernel on a GPU",
    fallback=_rms_norm,
    cost="RMSNorm on a GPU takes six kernels instead of one",
    check=has_schema("_fused_rms_norm", "input normalized_shape weight eps", 2),
    agrees=lambda part: _agrees(part, _rms_norm, _ramp(2, 4), (4,), _ramp(4), 1e-5),
).get()
fused_rms_norm_grad = Internal[Callable[..., Any]](
    "fused_rms_norm_grad",
    lambda: _ATEN._fused_rms_norm_backward.default,
    why="the gradient of fused_rms_norm",
    fallback=_rms_norm_grad,
    cost="the gradient of RMSNorm on a GPU takes ten kernels instead of one",
    check=has_schema("_fused_rms_norm_backward", "grad_out input normalized_shape rstd weight output_mask", 2),
    agrees=lambda part: _agrees(
        part, _rms_norm_grad, _ramp(2, 4), _ramp(2, 4), (4,), torch.ones(2, 1), _ramp(4), (True, True)
    ),
).get()


def _weight_norm(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    norm = torch.norm_except_dim(v, 2, dim)
    return v * (g / norm), norm


def _weight_norm_grad(dw: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    dg = (dw * v).sum(axes, keepdim=True) / norm
    return g / norm * (dw - v * (dg / norm)), dg


weight_norm = Internal[Callable[..., tuple[Tensor, Tensor]]](
    "weight_norm",
    lambda: torch._weight_norm_interface,
    why="also returns the norm that the gradient of weight_norm needs",
    fallback=_weight_norm,
    cost="weight_norm takes three kernels instead of one",
    check=has_schema("_weight_norm_interface", "v g dim", 2),
    agrees=lambda part: _agrees(part, _weight_norm, _ramp(2, 3), _ramp(2, 1) + 3, 0),
).get()
weight_norm_grad = Internal[Callable[..., tuple[Tensor, Tensor]]](
    "weight_norm_grad",
    lambda: _ATEN._weight_norm_interface_backward.default,
    why="the gradient of weight_norm",
    fallback=_weight_norm_grad,
    cost="the gradient of weight_norm takes eight kernels instead of one",
    check=has_schema("_weight_norm_interface_backward", "grad_w saved_v saved_g saved_norms dim", 2),
    agrees=lambda part: _agrees(
        part,
        _weight_norm_grad,
        _ramp(2, 3) - 1,
        _ramp(2, 3),
        _ramp(2, 1) + 3,
        torch.norm_except_dim(_ramp(2, 3), 2, 0),
        0,
    ),
).get()

# Indices and pools


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool, unsafe: bool) -> Tensor:
    return x.index_put_([*indices], values, accumulate)


index_put = Internal[Callable[..., Tensor]](
    "index_put",
    lambda: _ATEN._index_put_impl_.default,
    why="does not check the indices again as index_put_ does, which waits for a GPU",
    fallback=_index_put,
    cost="gradients of indexing wait for the GPU",
    check=has_schema("_index_put_impl_", "self indices values accumulate unsafe"),
    agrees=lambda part: _agrees(
        lambda i: part(torch.zeros(3), [i], torch.ones(2), True, True),
        lambda i: torch.tensor([0.0, 2.0, 0.0]),
        torch.tensor([1, 1]),
    ),
).get()


def _adaptive_avg_pool_grad(dy: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = torch.zeros_like(x, requires_grad=True)
        kernel = adaptive_avg_pool2d if dy.ndim == 4 else adaptive_avg_pool3d
        return torch.autograd.grad(kernel(leaf, dy.shape[2:]), leaf, dy)[0]


adaptive_avg_pool2d_grad = Internal[Callable[[Tensor, Tensor], Tensor]](
    "adaptive_avg_pool2d_grad",
    lambda: _ATEN._adaptive_avg_pool2d_backward.default,
    why="computes the gradient without running the pooling again",
    fallback=_adaptive_avg_pool_grad,
    cost="the pooling runs again in backward",
    check=has_schema("_adaptive_avg_pool2d_backward", "grad_output self"),
    agrees=lambda part: _agrees(part, _adaptive_avg_pool_grad, _ramp(1, 1, 2, 2), _ramp(1, 1, 3, 4)),
).get()
adaptive_avg_pool3d_grad = Internal[Callable[[Tensor, Tensor], Tensor]](
    "adaptive_avg_pool3d_grad",
    lambda: _ATEN._adaptive_avg_pool3d_backward.default,
    why="computes the gradient without running the pooling again",
    fallback=_adaptive_avg_pool_grad,
    cost="the pooling runs again in backward",
    check=has_schema("_adaptive_avg_pool3d_backward", "grad_output self"),
    agrees=lambda part: _agrees(part, _adaptive_avg_pool_grad, _ramp(1, 1, 2, 2, 1), _ramp(1, 1, 3, 4, 2)),
).get()

# oneDNN


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None, *fused: Any) -> Tensor:
    return torch.nn.functional.linear(a, weight, bias)


onednn_linear = Internal[Callable[..., Tensor]](
    "onednn_linear",
    lambda: torch.ops.mkldnn._linear_pointwise.default,
    why="runs oneDNN's GEMM where PyTorch chooses another library's",
    fallback=_linear,
    cost="GEMMs for which oneDNN is faster run in the library that PyTorch chooses",
    check=has_schema("_linear_pointwise", "X W B attr scalars algorithm"),
    agrees=lambda part: (
        not torch.backends.mkldnn.is_available()
        or _agrees(part, _linear, _ramp(2, 4), _ramp(3, 4), None, "none", [], "")
    ),
).get()
onednn_has_bfloat16 = Internal[Callable[[], bool]](
    "onednn_has_bfloat16",
    lambda: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    why="tells whether eager uses oneDNN's LSTM for bfloat16",
    fallback=lambda: False,
    cost="LSTMs in bfloat16 run step by step",
    check=lambda part: part() in (True, False),
).get()
