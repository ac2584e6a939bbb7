"""Programs by Inductor with the real compiler: small models, other sizes, a second process; --device cuda: on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.execute.inductor_program import program as by_inductor
from onnxtrain.execute.inductor_program.program import InductorProgram
from tests.zoo.checks import Comparison
from tests.zoo.models import ZOO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("regions_cache"),
    pytest.mark.compiler,
]


def inductor_programs(monkeypatch: pytest.MonkeyPatch) -> list[InductorProgram]:
    """Collect the programs made from now on; each is compiled after two calls."""
    programs: list[InductorProgram] = []
    watch = by_inductor.watch

    def watched(*arguments: Any) -> InductorProgram | None:
        program = watch(*arguments)
        if program is not None:
            programs.append(program)
        return program

    monkeypatch.setattr(by_inductor, "watch", watched)
    monkeypatch.setattr(by_inductor, "_CALLS", 2)
    return programs


def compiled(programs: list[InductorProgram], step: Any) -> list[InductorProgram]:
    """Return the programs that have been compiled and compared, to be used from now on."""
    for _ in range(2):
        step()
    for program in programs:
        if program.thread is not None:
            program.thread.join()
    step()
    used = [program for program in programs if program.thread is not None]
    for program in used:
        assert not program.refused
        program._run = program._compiled
    return used


@pytest.mark.parametrize("name", ["mlp", "llama", "bert-masked-lm"])
def test_a_model_of_the_zoo_trains_by_inductor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = inductor_programs(monkeypatch)
    entry = next(e for e in ZOO if e.name == name)
    compare = Comparison(entry, torch.float32, wrap=lambda m: ORTModule(m, kernels="inductor", tuning=False))
    compare.change(nn.Module.eval)
    used = compiled(programs, lambda: compare.train(*entry.sizes[0]))
    assert len(used) == 2
    for sizes in (*entry.sizes, (5, 6), (2, 7)):
        compare.train(*sizes)
    for program in used:
        assert program.call is not None
        assert sum(strides is not None for strides in program.call._strides.values()) >= 3  # sizes, none compiled again


def test_a_second_process_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(TRAINS)], capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stderr
        outputs.append(json.loads(child.stdout.splitlines()[-1]))
    first, second = outputs
    assert (first["compiled"], second["compiled"]) == (2, 0)
    assert first["used"] == second["used"] == 2
    assert first["gradient"] == second["gradient"]


TRAINS = """
    import json
    import torch
    from onnxtrain import ORTModule
    from onnxtrain.execute.inductor_program import program as by_inductor
    from onnxtrain.execute.regions import process

    programs, compiled = [], []
    watch, compile = by_inductor.watch, process.Process.compile
    by_inductor.watch = lambda *a: programs.append(watch(*a)) or programs[-1]
    process.Process.compile = lambda *a: compiled.append(a) or compile(*a)
    by_inductor._CALLS = 1

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.RMSNorm(8), torch.nn.Linear(8, 5))
    module = ORTModule(block, kernels="inductor", tuning=False)
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(4):
        x.grad = None
        module(x).square().sum().backward()
        for program in programs:
            if program.thread is not None:
                program.thread.join()
            if program.call is not None and program._run == program._timing:
                program._run = program._compiled
    used = sum(program._run == program._compiled for program in programs)
    print(json.dumps({"compiled": len(compiled), "used": used, "gradient": x.grad.tolist()}))
"""
