"""Facts about many gradients at once, in one call of PyTorch per device and type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def grouped(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors by device and type: one call takes those of one kind."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def found_non_finite(gradients: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Whether any element of any gradient is infinite or NaN, without waiting for a GPU.

    Args:
        gradients: they keep their values.
        device: where the answer lies; the first gradient's device where None.

    Returns:
        float32 [1]: 1 where there is one, else 0.
    """
    return unscale(gradients, None, device)


def unscale(
    gradients: Sequence[torch.Tensor], inverse: torch.Tensor | None, device: torch.device | None = None
) -> torch.Tensor:
    """Multiplies the gradients in place, and says whether any element is infinite or NaN, in the same pass.

    Args:
        gradients: what is scaled.
        inverse: float32 [], the factor; None stands for one.
        device: where the answer lies; the first gradient's device where None.

    Returns:
        float32 [1]: 1 where there is one, else 0.
    """
    device = device or (gradients[0].device if gradients else torch.device("cpu"))
    total = torch.zeros(1, device=device)
    for group in grouped(gradients):
        place = group[0].device
        found = total if place == device else torch.zeros(1, device=place)
        factor = torch.ones((), device=place) if inverse is None else inverse.to(place)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found, factor)
        if found is not total:
            total.add_(found.to(device))
    return total.clamp_(max=1.0)


def norm(gradients: Sequence[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """The 2-norm of all gradients as one vector.

    Args:
        gradients: of any devices and types; those of half precision are summed in float32.
        device: where the answer lies; the first gradient's device where None.

    Returns:
        float32 [], or float64 where a gradient is.
    """
    if not gradients:
        return torch.zeros((), device=device)
    device = device or gradients[0].device
    wide = torch.float64 if any(g.dtype is torch.float64 for g in gradients) else torch.float32
    norms: list[torch.Tensor] = []
    for group in grouped(gradients):
        norms += torch._foreach_norm(group, 2, dtype=wide)
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(device) for each in norms]))
    return total
