"""Write statistics of each module's outputs and their gradients, one file per tensor and step.

<folder>/step_0/order.txt                             the names in the order of forward
<folder>/step_0/Linear_3_0th_output_forward           the first output of the module with index 3
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
    """Write statistics of each tensor to files.

    They are: shape, range, mean, standard deviation; the counts of NaN, infinite, negative, positive and zero elements;
    and the first elements.

    Args:
        output_dir: the folder; created if it does not exist.
        start_step: the first step to write.
        end_step: the step after the last one to write.
        override_output_dir: whether to empty an existing folder.
        run_on_cpu: whether to copy tensors to the CPU, which saves GPU memory.
        bucket_size: how many elements are processed at once.

    Raises:
        FileExistsError: the folder exists, and `override_output_dir` is False.
        ValueError: `bucket_size` is less than 1.
    """

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
            raise ValueError(f"bucket_size is {bucket_size}; expected an integer >= 1.")
        self._folder = Path(output_dir)
        self._run_on_cpu = run_on_cpu
        self._bucket_size = bucket_size
        if self._folder.exists():
            if not override_output_dir:
                raise FileExistsError(
                    f"The folder {self._folder} exists already: pass another output_dir, or override_output_dir=True."
                )
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)

    def post_forward_tensor_apply_impl(
        self, run_rtx: RuntimeStates, module: torch.nn.Module, tensor_idx: int, tensor: torch.Tensor
    ) -> torch.Tensor:
        """Write the statistics of the tensor and, in backward, of its gradient."""
        index = run_rtx.global_states.module_index[module]
        return self.inspect(run_rtx, f"{type(module).__name__}_{index}_{tensor_idx}th_output", tensor)

    def inspect(self, run_rtx: RuntimeStates, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor; whenever it or its gradient is computed, a file is written."""
        inspected: torch.Tensor = _Inspect.apply(tensor, name, run_rtx, self)  # type: ignore[no-untyped-call]  # PyTorch's
        return inspected

    def write(self, step: int, name: str, direction: str, tensor: torch.Tensor) -> None:
        """Write the statistics of a tensor, except during a capture.

        Args:
            step: of the forward pass.
            name: of the tensor.
            direction: "forward" or "backward".
            tensor: the activation or gradient.
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
    """Inspect a tensor inside forward. Use the result in its place.

    Args:
        activation_name: the prefix of its files.
        tensor: the activation.

    Raises:
        RuntimeError: `GlobalSubscriberManager` has no StatisticsSubscriber.
    """
    subscriber = GlobalSubscriberManager.get_subscriber(StatisticsSubscriber)
    assert isinstance(subscriber, StatisticsSubscriber)
    return subscriber.inspect(GlobalSubscriberManager.get_run_context(), activation_name, tensor)


class _Inspect(torch.autograd.Function):
    """The identity, which writes the statistics of its tensor and of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str, run_rtx: RuntimeStates, subscriber: StatisticsSubscriber
    ) -> torch.Tensor:
        ctx.step = run_rtx.global_states.execution_step
        ctx.target = name, subscriber
        subscriber.write(ctx.step, name, "forward", tensor.detach())
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        name, subscriber = ctx.target
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
    samples = ", ".join(
        f"{value:.9g}" if isinstance(value, float) else str(value) for value in flat[:_SAMPLES].tolist()
    )
    yield f"first elements: [{samples}]"


def _numbers(flat: torch.Tensor, bucket: int) -> Iterator[str]:
    """Return range, moments and counts, bucket by bucket: only one bucket at a time is copied to float64."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    counts = dict.fromkeys(("nan", "inf", "negative", "positive", "zero"), 0)
    lowest, highest, total, finite = float("inf"), float("-inf"), 0.0, 0
    for piece in flat.split(bucket):
        wide = piece.double()
        for name, matches in (
            ("nan", wide.isnan()),
            ("inf", wide.isinf()),
            ("negative", wide < 0),
            ("positive", wide > 0),
            ("zero", wide == 0),
        ):
            counts[name] += int(matches.sum())
        values = wide[wide.isfinite()]
        if values.numel():
            lowest, highest = min(lowest, values.min().item()), max(highest, values.max().item())
            total, finite = total + values.sum().item(), finite + values.numel()
    if finite:
        mean = total / finite
        squares = (((p := piece.double())[p.isfinite()] - mean).square().sum().item() for piece in flat.split(bucket))
        deviation = (sum(squares) / max(1, finite - 1)) ** 0.5
        yield f"min: {lowest:.9g}  max: {highest:.9g}  mean: {mean:.9g}  std: {deviation:.9g}"
    yield "  ".join(f"{name}: {count}" for name, count in counts.items())
