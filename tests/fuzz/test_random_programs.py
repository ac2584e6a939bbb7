"""A small share of the random programs: the same on every machine. `make fuzz` runs as many as there is time for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz import differential
from tests.fuzz.configurations import Configuration
from tests.fuzz.differential import Verdict, judge, load
from tests.fuzz.operators import OPERATORS
from tests.fuzz.programs import Program, Statement, Tensor, draw
from tests.fuzz.reduce import reduced
from tests.fuzz.script import script
from tests.fuzz.worker import Case, case_of


def test_a_seed_is_a_program() -> None:
    assert draw(11).source() == draw(11).source()
    assert draw(11).source() != draw(12).source()
    assert case_of(3).configuration == case_of(3).configuration


def test_most_operators_can_be_drawn() -> None:
    """The templates are right Python for the operands that they ask for: most of a group occur in a few programs."""
    text = "\n".join(draw(seed).source() for seed in range(120))
    for group, (_, templates) in OPERATORS.items():
        names = {t.partition("(")[0] for t in templates if t.startswith(("torch.", "F."))}
        assert sum(name in text for name in names) >= len(names) / 4, group


def program(*statements: str, outputs: tuple[str, ...] = ("v1",)) -> Program:
    found = tuple(Statement(text, (text.partition(" = ")[0],)) for text in statements)
    types = {f"v{i}": (((3, 4),), torch.float32) for i in range(len(statements))}
    return Program(0, (Tensor("x0", ((3, 4),), trained=True),), statements=found, outputs=outputs, types=types)


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = differential._Sides.ours

    def off_by_a_thousandth(self: Any) -> Any:
        found = right(self)
        return [{**call, "output 0": call["output 0"] * 1.001} for call in found]

    case = program("v0 = x0 * 2", "v1 = v0 + 1")
    assert judge(case, Configuration()).kind == "equal"
    monkeypatch.setattr(differential._Sides, "ours", off_by_a_thousandth)
    assert judge(case, Configuration()).kind == "wrong"


def test_a_program_shrinks_to_what_fails() -> None:
    def fails_by_tanh(case: Case) -> Case:
        kind = "wrong" if "tanh" in case.program.source() else "equal"
        return replace(case, verdict=Verdict(kind))

    made = program("v0 = x0 * 2", "v1 = v0.tanh()", "v2 = v1 + v0", "v3 = v2.sin()", outputs=("v3", "v0"))
    case = reduced(fails_by_tanh(Case(made, Configuration({"recompute_cheap": False}))), fails_by_tanh, seconds=60)
    assert case.program.statements[0].text.endswith(".tanh()")
    assert len(case.program.statements) == 1
    assert not case.configuration.options


def test_a_program_that_eager_refuses_does_not_count() -> None:
    assert judge(program("v0 = x0 @ x0", "v1 = v0 * 2"), Configuration()).kind == "discarded"


def test_a_script_stands_alone() -> None:
    text = script(Case(program("v0 = x0 * 2", "v1 = v0.tanh()"), Configuration({"recompute_cheap": False})))
    assert "tests." not in text
    load(text)
