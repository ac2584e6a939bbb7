"""Keep image tensors [n, c, h, w] in channels_last between convolutions, whatever the input's memory format.

    x ──to channels_last──> Conv ─> BatchNorm ─> Relu ─> Conv ─> … ──to contiguous──> Reshape

A convolution that gains from channels_last requests it, and a layout-preserving op propagates it. Before any
other op reads such a value, and before it leaves the program, it is converted back to contiguous, unless eager PyTorch
has it in channels_last, too: a module may permute its images. On 2 cores of an Intel Xeon a convolution of 32 to 64
channels takes 0.7 of its contiguous time, a batch norm 0.5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxtrain.graph.values import rank_of
from onnxtrain.ops import definition_of
from onnxtrain.ops.definition import Method
from onnxtrain.ops.interfaces.memory_format import EAGERS_FORMAT, IMAGES

_MIN_CONVOLUTIONS = 2  # a single one gains no more than its conversions cost


def is_profitable(nodes: Iterable[ir.Node], inputs: Sequence[torch.Tensor]) -> bool:
    """Return whether to run a graph in channels_last.

    False if the user already does: given channels_last weights or inputs, PyTorch's kernels preserve it by themselves.

    Args:
        nodes: those of the forward graph.
        inputs: the module's parameters and inputs.
    """
    if any(t.device.type != "cpu" or (t.dim() > 2 and not t.is_contiguous()) for t in inputs):
        return False
    return sum(map(_gains, nodes)) >= _MIN_CONVOLUTIONS


def _is_image(value: ir.Value | None) -> bool:
    return value is not None and rank_of(value) == 4


def _gains(node: ir.Node) -> bool:
    images = IMAGES.entry(node)
    if images is None or images.prefers_channels_last is None or not _is_image(node.outputs[0]):
        return False
    return images.prefers_channels_last(node)


class ChannelsLast:
    """The values of a graph that are channels_last, and the calls that convert to and from it.

    A value's memory format follows from its producers, so that forward and backward agree on the format of kept values.
    """

    def __init__(self) -> None:
        self._propagates: dict[ir.Node, bool] = {}

    def _runs_channels_last(self, node: ir.Node) -> bool:
        """Return whether a node computes its images in channels_last."""
        stack = [node]
        while stack:  # no recursion: graphs are deep
            current = stack[-1]
            if current in self._propagates:
                stack.pop()
            elif (entry := IMAGES.entry(current)) is None:
                self._propagates[current] = False
            elif entry.prefers_channels_last is not None:
                self._propagates[current] = _gains(current)
            else:
                images = _images_read(current)
                sources = [v.producer() for v in images]
                unknown = [s for s in sources if s is not None and s not in self._propagates]
                if unknown:
                    stack += unknown
                else:
                    self._propagates[current] = any(
                        self.is_channels_last(v) for v in images if v.producer() is not None
                    )
        return self._propagates[node]

    def is_channels_last(self, value: ir.Value) -> bool:
        """Return whether a value is an image tensor in channels_last."""
        node = value.producer()
        if node is None or not _is_image(value) or not self._runs_channels_last(node):
            return False
        images = IMAGES.entry(node)
        return images is not None and definition_of(node).output_name(value.index() or 0) in images.values

    def may_be_channels_last(self, value: ir.Value) -> bool:
        """Return whether a value may be channels_last: also true of a convolution's weight gradient."""
        node = value.producer()
        return node is not None and _is_image(value) and self._runs_channels_last(node)

    def is_made_contiguous(self, value: ir.Value) -> bool:
        """Return whether a value is converted to contiguous for other ops and for the user: not if eager's is not."""
        return EAGERS_FORMAT not in value.metadata_props and self.may_be_channels_last(value)

    def convert_arguments(self, node: ir.Node, arguments: Sequence[Any]) -> list[Any]:
        """Return a node's arguments, each converted to the memory format in which the node reads it."""
        definition, formats = definition_of(node), self._conversions(node)
        if definition.inputs and definition.inputs[-1].endswith("..."):
            fixed = len(definition.inputs) - 1
            variadic = tuple(map(_convert, formats[fixed:], arguments[fixed]))
            return [*map(_convert, formats[:fixed], arguments), variadic]
        return [*map(_convert, formats, arguments), *arguments[len(formats) :]]

    def converted_inputs(self, node: ir.Node) -> Collection[ir.Value]:
        """Return the inputs that a node reads in a different memory format: each is copied."""
        conversions = zip(node.inputs, self._conversions(node), strict=True)
        return {v for v, memory_format in conversions if v is not None and memory_format}

    def _conversions(self, node: ir.Node) -> list[torch.memory_format | None]:
        """Return the memory format that each input is converted to; None if it is not converted."""
        definition = definition_of(node)
        images = IMAGES.entry(node)
        values = images.values if images is not None and self._runs_channels_last(node) else frozenset()
        formats: list[torch.memory_format | None] = []
        for index, value in enumerate(node.inputs):
            if value is None:
                formats.append(None)
            elif definition.input_name(index) in values:
                convert = _is_image(value) and not self.is_channels_last(value)
                formats.append(torch.channels_last if convert else None)
            else:
                formats.append(torch.contiguous_format if self.is_made_contiguous(value) else None)
        return formats


def made_contiguous(image: torch.Tensor) -> torch.Tensor:
    """Return an image with the strides of a contiguous one; `contiguous()` ignores those of axes of size 1."""
    height, width = image.shape[2:]
    if image.stride()[1:] == (height * width, width, 1) and image.is_contiguous():
        return image
    return image.clone(memory_format=torch.contiguous_format)


def _convert(memory_format: torch.memory_format | None, argument: Any) -> Any:
    if memory_format is None or not isinstance(argument, str):
        return argument
    return Method(
        "contiguous", argument, **({} if memory_format is torch.contiguous_format else {"memory_format": memory_format})
    )


def _images_read(node: ir.Node) -> list[ir.Value]:
    """Return the images that a node reads in the memory format in which it writes."""
    definition, images = definition_of(node), IMAGES.entry(node)
    assert images is not None
    return [v for i, v in enumerate(node.inputs) if v is not None and definition.input_name(i) in images.values]
