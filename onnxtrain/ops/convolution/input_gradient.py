"""The gradient of a convolution's images in channels_last memory format, as exact as in contiguous.

    dx = gradient(dy[:, :16], w[:16]) + gradient(dy[:, 16:], w[16:])

PyTorch's kernel for channels_last adds the terms of all output channels in a row, that for contiguous images those of
each 16 separately: on an AMD EPYC with AVX2, dx has 1.41 times its mean error with 32 output channels, 1.00 times in
blocks. 32 output channels of 8 images of 32 x 32 take 2.3 ms in blocks, 2.2 ms in a row, 2.5 ms contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 16  # output channels
EXACT_CHANNELS = 32  # in channels_last: three blocks take 1.7 times as long as the contiguous kernel


def gradients_in_blocks(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of x[n, c, h, w], w[o, c, k, l] and the bias, without groups.

    Args:
        dy: the gradient of the result.
        x: the images.
        w: the weight.
        strides: of the convolution.
        pads: of the convolution.
        dilations: of the convolution.
        mask: which gradients to compute; the others are None.
    """
    geometry = (strides, pads, dilations, False, [0, 0], 1)
    bias = [w.size(0)] if mask[2] else None
    if not mask[0] or not _is_less_exact(dy, w, strides, dilations):
        return torch.ops.aten.convolution_backward.default(dy, x, w, bias, *geometry, mask)
    dw, db = None, None
    if mask[1] or mask[2]:
        _, dw, db = torch.ops.aten.convolution_backward.default(dy, x, w, bias, *geometry, [False, *mask[1:]])
        dw = dw if mask[1] else None
    return input_gradient(dy, x, w, strides, pads, dilations), dw, db


def input_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
) -> torch.Tensor:
    """Return the gradient of x, in blocks where that is worth it; see `gradients_in_blocks` for the arguments."""
    options = (None, strides, pads, dilations, False, [0, 0], 1, [True, False, False])
    if not _is_less_exact(dy, w, strides, dilations):
        whole: torch.Tensor = torch.ops.aten.convolution_backward.default(dy, x, w, *options)[0]
        return whole
    first, *others = (
        torch.ops.aten.convolution_backward.default(
            part.contiguous(memory_format=torch.channels_last), x, weight, *options
        )[0]
        for part, weight in zip(dy.split(BLOCK, 1), w.split(BLOCK), strict=True)
    )
    for other in others:
        first += other
    dx: torch.Tensor = first
    return dx


def _is_less_exact(dy: torch.Tensor, w: torch.Tensor, strides: Sequence[int], dilations: Sequence[int]) -> bool:
    """Return whether PyTorch's kernel adds more than a block in a row, where that for contiguous images does not.

    With strides or dilations, both do.
    """
    is_affected = BLOCK < w.size(0) <= EXACT_CHANNELS and w[0, 0].numel() > 1 and {*strides, *dilations} == {1}
    is_last = dy.is_contiguous(memory_format=torch.channels_last) and not dy.is_contiguous()
    return is_affected and is_last and dy.device.type == "cpu"
