"""Access AOTInductor, which compiles a region of a program to a library, and the runner of such a library."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from onnxtrain.torch_compat.internal import Internal


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(f"this PyTorch lacks {name}")

    return refuse


COMPILE_PACKAGE = Internal[Callable[..., Any]](
    "compile_package",
    lambda: importlib.import_module("torch._inductor").aoti_compile_and_package,
    why="documented, but in a private module",
    fallback=_refuse("torch._inductor.aoti_compile_and_package"),
    cost="operators are not fused to compiled regions",
    check=callable,
)
CPU_RUNNER = Internal[Callable[..., Any]](
    "cpu_runner",
    lambda: torch._C._aoti.AOTIModelContainerRunnerCpu,
    why="the documented loader unpacks its file and adds some 100 us to each call",
    fallback=_refuse("torch._C._aoti"),
    cost="operators are not fused to compiled regions",
    check=callable,
)
