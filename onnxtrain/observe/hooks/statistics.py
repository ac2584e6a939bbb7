"""Writes statistics of every module's outputs and of their gradients, one file a tensor and step.

<folder>/step_0/order.txt                             the names in the order in which forward made them
<folder>/step_0/Linear_3_0th_output_forward           the first output of the module with number 3
<folder>/step_0/Linear_3_0th_output_backward          its gradient
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from onnxtrain.observe.hooks.manager import GlobalSubscriberManager, is_computed
from onnxtrain.observe.hooks.subscriber import RuntimeStates, SubscriberBase

_SAMPLES = 128


class StatisticsSubscriber(SubscriberBase):
    """Writes the statistics of each tensor: shape, range, mean, deviation, counts of NaN, infinite, negative, positive
    and zero elements, and the first elements.

    Args:
        output_dir: the folder; made where it is missing.
        start_step: the first step that is written.
        end_step: the first step that is no longer written.
        override_output_dir: an existing folder is emptied first.
        run_on_cpu: tensors are copied to the CPU, so that no GPU memory is needed to look at them.
        bucket_size: elements that are looked at at once.

    Raises:
        FileExistsError: the folder exists, and `override_output_dir` is off.
        ValueError: `bucket_size` is less than 1.
    """  # noqa: D205  the list is one sentence

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        start_step: int | None = None,
        end_step: int | None = None,
        override_output_dir: bool = False,
        run_on_cpu: bool = False,
        bucket_size: int = 2**29,
    ) -> None:
        super().__init__(start_step, end_step)
        if bucket_size < 1:
            raise ValueError(f"bucket_size is {bucket_size}; expected 1 or more.")
        self._folder = Path(output_dir)
        self._run_on_cpu = run_on_cpu
        self._bucket_size = bucket_size
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(
                    f"The folder {self._folder} is there already: give another output_dir, or override_output_dir=True."
                )
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Looks at the tensor and, in backward, at its gradient."""
        index = run_rtx.global_states.module_index[module]
        return self.inspect(run_rtx, f"{type(module).__name__}_{index}_{tensor_idx}th_output", tensor)

    def inspect(self, run_rtx: RuntimeStates, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor; each time it is computed, and its gradient is, a file is written."""
        found: torch.Tensor = _Inspect.apply(tensor, name, run_rtx, self)  # type: ignore[no-untyped-call]  # PyTorch's
        return found

    def write(self, step: int, name: str, direction: str, tensor: torch.Tensor) -> None:
        """Writes the statistics of a tensor, unless the module is only captured.

        Args:
            step: the step of the forward.
            name: of the tensor.
            direction: "forward" or "backward".
            tensor: what is looked at.
        """
        if not is_computed(tensor) or not self.watches(step):
            return
        folder = self._folder / f"step_{step}"
        folder.mkdir(exist_ok=True)
        if direction == "forward":
            with open(folder / "order.txt", "a", encoding="utf-8") as order:
                order.write(f"{name}\n")
        text = "\n".join(_summary(tensor.cpu() if self._run_on_cpu else tensor, self._bucket_size))
        (folder / f"{name}_{direction}").write_text(f"{name} {direction}\n{text}\n", encoding="utf-8")


def inspect_activation(activation_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Looks at a tensor inside a forward; use what it gives in the tensor's place.

    Args:
        activation_name: how its files begin.
        tensor: what is looked at.

    Raises:
        RuntimeError: `GlobalSubscriberManager` has no StatisticsSubscriber.
    """
    subscriber = GlobalSubscriberManager.get_subscriber(StatisticsSubscriber)
    assert isinstance(subscriber, StatisticsSubscriber)
    return subscriber.inspect(GlobalSubscriberManager.get_run_context(), activation_name, tensor)


class _Inspect(torch.autograd.Function):
    """Gives its tensor as it is, and has it written, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str, run_rtx: RuntimeStates, subscriber: StatisticsSubscriber
    ) -> torch.Tensor:
        ctx.step = run_rtx.global_states.execution_step
        ctx.known = name, subscriber
        subscriber.write(ctx.step, name, "forward", tensor.detach())
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, subscriber = ctx.known
        subscriber.write(ctx.step, name, "backward", gradients[0])
        return gradients[0], None, None, None

    @staticmethod
    def alias_input(node_proto_str: str) -> tuple[list[int], list[int]]:
        return [0], [0, -1, -1, -1]


def _summary(tensor: torch.Tensor, bucket: int) -> Iterator[str]:
    flat = tensor.detach().reshape(-1)
    yield f"shape: {tuple(tensor.shape)}  dtype: {tensor.dtype}  elements: {flat.numel()}"
    if flat.numel():
        yield from _numbers(flat, bucket)
    shown = ", ".join(f"{value:.9g}" if isinstance(value, float) else str(value) for value in flat[:_SAMPLES].tolist())
    yield f"first elements: [{shown}]"


def _numbers(flat: torch.Tensor, bucket: int) -> Iterator[str]:
    """Range, moments and counts, piece by piece, so that a copy in float64 never takes more than a piece."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    counts = dict.fromkeys(("nan", "inf", "negative", "positive", "zero"), 0)
    lowest, highest, total, finite = float("inf"), float("-inf"), 0.0, 0
    for piece in flat.split(bucket):
        wide = piece.double()
        for name, found in (
            ("nan", wide.isnan()),
            ("inf", wide.isinf()),
            ("negative", wide < 0),
            ("positive", wide > 0),
            ("zero", wide == 0),
        ):
            counts[name] += int(found.sum())
        kept = wide[wide.isfinite()]
        if kept.numel():
            lowest, highest = min(lowest, kept.min().item()), max(highest, kept.max().item())
            total, finite = total + kept.sum().item(), finite + kept.numel()
    if finite:
        mean = total / finite
        squares = (((p := piece.double())[p.isfinite()] - mean).square().sum().item() for piece in flat.split(bucket))
        deviation = (sum(squares) / max(1, finite - 1)) ** 0.5
        yield f"min: {lowest:.9g}  max: {highest:.9g}  mean: {mean:.9g}  std: {deviation:.9g}"
    yield "  ".join(f"{name}: {count}" for name, count in counts.items())
