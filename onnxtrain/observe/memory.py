"""Print the memory of training by phase (ORTMODULE_PRINT_MEMORY_STATS)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from onnxtrain.system.ranks import rank
from onnxtrain.torch_compat.autograd import queue_callback

_MIB = 2**20
_ALL_STEPS_BELOW = 10


def log_memory_usage(
    cur_phase: str,
    rank_0_only: bool = True,
    step_info: str = "",
    logger: logging.Logger | None = None,
    module: torch.nn.Module | None = None,
) -> None:
    """Log the memory in use, in MiB: of the GPU as torch counts it, and the resident memory of the process.

    Args:
        cur_phase: the phase, such as "after forward".
        rank_0_only: whether only rank 0 logs.
        step_info: the step, such as "step 3".
        logger: logs at INFO; None: print to stdout.
        module: if given, the bytes of its parameters, gradients and buffers are logged too.
    """
    if rank_0_only and rank():
        return
    parts = [f"{name} {value / _MIB:.0f}" for name, value in (*_in_use(), *_of_module(module))]
    text = f"{step_info + ' ' if step_info else ''}{cur_phase}: {', '.join(parts)} MiB"
    if logger is None:
        print(text, flush=True)  # noqa: T201  the caller asks for it
    else:
        logger.info("%s", text)


def _in_use() -> Iterator[tuple[str, float]]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield "allocated", torch.cuda.memory_allocated()
        yield "peak", torch.cuda.max_memory_allocated()
        yield "reserved", torch.cuda.memory_reserved()
        yield "inactive", torch.cuda.memory_stats().get("inactive_split_bytes.all.current", 0)
    status = Path("/proc/self/statm")
    if status.exists():  # Linux
        yield "process", int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _of_module(module: torch.nn.Module | None) -> Iterator[tuple[str, float]]:
    if module is None:
        return
    parameters = list(module.parameters())
    yield "parameters", _bytes(parameters)
    yield "gradients", _bytes([p.grad for p in parameters if p.grad is not None])
    yield "buffers", _bytes(list(module.buffers()))


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class MemoryWatch:
    """Run the calls of a module and print the memory before and after forward and backward on rank 0.

    All of the first steps are printed, then those whose number is a power of two.

    Args:
        run: runs a call: (args, kwargs) -> output.
        name: of the module.
    """

    def __init__(self, run: Callable[[tuple[Any, ...], Mapping[str, Any]], Any], name: str) -> None:
        self._run, self._name = run, name
        self._step = 0

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        step, self._step = self._step, self._step + 1
        if step >= _ALL_STEPS_BELOW and step & (step - 1):
            return self._run(args, kwargs)
        self._log(step, "before forward")
        output = self._run(args, kwargs)
        self._log(step, "after forward")
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: self._in_backward(step))
                break
        return output

    def _in_backward(self, step: int) -> None:
        self._log(step, "before backward")
        queue_callback(lambda: self._log(step, "after backward"))

    def _log(self, step: int, phase: str) -> None:
        log_memory_usage(phase, step_info=f"{self._name} step {step}")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
