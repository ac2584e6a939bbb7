"""The example of docs/how-to/migration.md that needs DeepSpeed trains with a stand-in for DeepSpeed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optim import library_stand_ins as stand_ins

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "migration.md"
DEEPSPEED = "deepspeed.runtime.zero.stage_1_and_2"


class ZeroOptimizer(stand_ins.DeepSpeed):
    """Steps a float32 optimizer from the gradients of float16 parameters."""

    def __init__(self, halves: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        super().__init__({0: []})
        self.halves, self.optimizer, self.scale = halves, optimizer, 1024.0
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in halves]
        optimizer.param_groups[0]["params"] = self.masters

    def step(self) -> None:
        self.averaged_gradients = {0: [p.grad for p in self.halves]}
        if self.has_overflow_partitioned_grads_serial():
            self.scale /= 2
            return
        norm = self.get_grad_norm_direct([p.grad for p in self.halves if p.grad is not None], self.halves)
        for half, master in zip(self.halves, self.masters, strict=True):
            assert half.grad is not None
            master.grad = half.grad.float() / torch.maximum(norm, torch.tensor(self.scale))
            half.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for half, master in zip(self.halves, self.masters, strict=True):
                half.copy_(master)


class Engine:
    """What `deepspeed.initialize` returns: forward, backward and step."""

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module = module.half()
        of_library = type("DeepSpeedZeroOptimizer", (ZeroOptimizer,), {"__module__": DEEPSPEED})
        self.optimizer = of_library(list(module.parameters()), optimizer)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.optimizer.scale).backward()

    def step(self) -> None:
        self.optimizer.step()


def test_ortmodule_fused_adam_and_fp16_optimizer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def initialize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Any) -> tuple[Engine, None]:
        assert config["fp16"]["enabled"]
        engines.append(Engine(model, optimizer))
        return engines[0], None

    library = types.ModuleType("deepspeed")
    library.initialize = initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    namespace: dict[str, Any] = {"__name__": "example"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)[:3]:
        exec(block, namespace)
    torch.manual_seed(0)
    batches = [torch.randn(8, 4) for _ in range(2)] * 10
    losses = namespace["train_in_half_precision"](torch.nn.Linear(4, 2), batches)
    assert losses[-2] < losses[0]
    assert losses[-1] < losses[1]
    assert vars(engines[0].optimizer)["get_grad_norm_direct"], "FP16_Optimizer has not replaced it"
