"""Operations on many gradients at once, in one call of PyTorch per device and dtype."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from onnxtrain.torch_compat.optimizer_kernels import check_and_unscale, foreach_norm


def grouped(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def group_lists(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
    """Group parallel lists of tensors by the device and dtype of the first list's tensors."""
    groups: dict[tuple[torch.device, torch.dtype], list[list[torch.Tensor]]] = {}
    for tensors in zip(*lists, strict=True):
        group = groups.setdefault((tensors[0].device, tensors[0].dtype), [[] for _ in lists])
        for members, tensor in zip(group, tensors, strict=True):
            members.append(tensor)
    return list(groups.values())


def found_non_finite(gradients: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return whether any element of any gradient is infinite or NaN, without a device synchronization.

    Args:
        gradients: not modified.
        device: of the result; None: that of the first gradient.

    Returns:
        float32 [1]: 1 if any is, else 0.
    """
    return unscale(gradients, None, device)


def unscale(
    gradients: Sequence[torch.Tensor], inverse: torch.Tensor | None, device: torch.device | None = None
) -> torch.Tensor:
    """Multiply gradients in place by the inverse loss scale and check them for infinite and NaN elements, in one pass.

    Args:
        gradients: modified in place.
        inverse: float32 [], the factor; None: 1.
        device: of the result; None: that of the first gradient.

    Returns:
        float32 [1]: 1 if any element is infinite or NaN, else 0.
    """
    device = device or (gradients[0].device if gradients else torch.device("cpu"))
    total = torch.zeros(1, device=device)
    for group in grouped(gradients):
        on = group[0].device
        non_finite = total if on == device else torch.zeros(1, device=on)
        factor = torch.ones((), device=on) if inverse is None else inverse.to(on)
        check_and_unscale(group, non_finite, factor)
        if non_finite is not total:
            total.add_(non_finite.to(device))
    return total.clamp_(max=1.0)


def norm(gradients: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Return the 2-norm of the vector of all gradients.

    Args:
        gradients: of any devices and dtypes; half precision is accumulated in float32.
        device: of the result; None: that of the first gradient.

    Returns:
        float32 [], or float64 if any gradient is float64.
    """
    if not gradients:
        return torch.zeros((), device=device)
    device = device or gradients[0].device
    wide = torch.float64 if any(g.dtype is torch.float64 for g in gradients) else torch.float32
    norms: list[torch.Tensor] = []
    for group in grouped(gradients):
        norms += foreach_norm(group, wide)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(device) for each in norms]))
    return total
