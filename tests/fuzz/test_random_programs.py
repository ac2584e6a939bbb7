"""A small number of random programs, the same on every machine. `make fuzz` runs as many as time permits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz import differential, regions
from tests.fuzz.configurations import Configuration
from tests.fuzz.differential import Verdict, judge, load
from tests.fuzz.graphs import difference, draw_graph
from tests.fuzz.operators import OPERATORS
from tests.fuzz.programs import Program, Statement, Tensor, draw
from tests.fuzz.reduce import reduced
from tests.fuzz.script import script
from tests.fuzz.worker import Case, case_of, judged
from tests.thinned import slow_but_every
from tests.torch_version import needs_torch


def test_a_seed_determines_the_program() -> None:
    assert draw(11).source() == draw(11).source()
    assert draw(11).source() != draw(12).source()
    assert case_of(3).configuration == case_of(3).configuration


def test_most_operators_can_be_sampled() -> None:
    """The templates are valid Python for their operands: most of each group occur in a few programs."""
    text = "\n".join(draw(seed).source() for seed in range(120))
    for group, (_, templates) in OPERATORS.items():
        names = {t.partition("(")[0] for t in templates if t.startswith(("torch.", "F."))}
        assert sum(name in text for name in names) >= len(names) / 4, group


def program(*statements: str, outputs: tuple[str, ...] = ("v1",)) -> Program:
    parsed = tuple(Statement(text, (text.partition(" = ")[0],)) for text in statements)
    types = {f"v{i}": (((3, 4),), torch.float32) for i in range(len(statements))}
    return Program(0, (Tensor("x0", ((3, 4),), trained=True),), statements=parsed, outputs=outputs, types=types)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = differential.Sides.ours

    def off_by_a_thousandth(self: Any) -> Any:
        results = right(self)
        return [{**call, "output 0": call["output 0"] * 1.001} for call in results]

    case = program("v0 = x0 * 2", "v1 = v0 + 1")
    assert judge(case, Configuration()).kind == "equal"
    monkeypatch.setattr(differential.Sides, "ours", off_by_a_thousandth)
    assert judge(case, Configuration()).kind == "wrong"


def test_perturbed_results_have_eagers_dtype_and_are_near() -> None:
    """A program with a parameter, which takes no float64 inputs; nothing else tells unstable from wrong."""
    scaled = replace(program("v0 = x0 * 2", "v1 = F.linear(v0, self.p0)"), parameters=(Tensor("self.p0", ((2, 4),)),))
    sides = differential.Sides(scaled, Configuration())
    eager, exact = sides.eager(), sides.exact()
    for near, still in ((sides.moved(0), eager), (sides.exact(0), exact)):
        assert near[0]["output 0"].dtype == still[0]["output 0"].dtype
        assert 1e-8 < differential._distance(near[0]["output 0"], still[0]["output 0"]) < 1e-4


def test_float64_has_eagers_inputs() -> None:
    """From 16 elements on, PyTorch samples other values in float64; the bound would be as large as the results."""
    wide = replace(program("v0 = x0 * 2", "v1 = v0 + 1"), inputs=(Tensor("x0", ((9, 7),), trained=True),))
    sides = differential.Sides(wide, Configuration())
    eager, exact = sides.eager(), sides.exact()
    assert torch.equal(exact[0]["output 0"].float(), eager[0]["output 0"])


def test_rounding_perturbs_each_result_by_one_rounding_error_and_no_view() -> None:
    x = torch.randn(50)
    with differential._Rounding(1):
        y, view = x * 2, x[1:]
    assert torch.equal(view, x[1:])
    off = ((y.double() - x.double() * 2) / y).abs() / torch.finfo(torch.float).eps
    assert 0.25 < off.min() < off.max() < 2


def test_a_wrong_result_is_not_attributed_to_rounding() -> None:
    sides = differential.Sides(program("v0 = x0 * 2", "v1 = v0.tanh()"), Configuration())
    eager, exact = sides.eager(), sides.exact()
    for far, moves in ((1e-7, True), (1e-4, False)):
        got = [{**call, "output 0": exact[n]["output 0"].float() + far} for n, call in enumerate(eager)]
        assert sides.moves(eager, exact, got) == moves


def test_fused_regions_run_in_the_second_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    written = regions._written
    monkeypatch.setattr(regions, "_written", lambda *given: (asked.append(r) or r for r in written(*given)))
    configuration = Configuration({"rng": "fast", "kernels": "fused-all"}, regions=True)
    assert judge(program("v0 = x0 * 2", "v1 = torch.tanh(v0) * x0"), configuration).kind == "equal"
    assert asked


def test_other_random_numbers_are_compared_by_form() -> None:
    drops = program("v0 = x0 * 2", "v1 = F.dropout(v0, 0.5, True)")
    assert judge(drops, Configuration({"rng": "fast"})).kind == "equal"


def test_a_program_shrinks_to_the_failing_statements() -> None:
    def fails_by_tanh(case: Case) -> Case:
        kind = "wrong" if "tanh" in case.program.source() else "equal"
        return replace(case, verdict=Verdict(kind))

    original = program("v0 = x0 * 2", "v1 = v0.tanh()", "v2 = v1 + v0", "v3 = v2.sin()", outputs=("v3", "v0"))
    case = reduced(fails_by_tanh(Case(original, Configuration({"recompute": "none"}))), fails_by_tanh, seconds=60)
    assert case.program.statements[0].text.endswith(".tanh()")
    assert len(case.program.statements) == 1
    assert not case.configuration.options


def test_a_program_that_eager_refuses_does_not_count() -> None:
    assert judge(program("v0 = x0 @ x0", "v1 = v0 * 2"), Configuration()).kind == "discarded"


def test_a_script_is_standalone() -> None:
    text = script(Case(program("v0 = x0 * 2", "v1 = v0.tanh()"), Configuration({"recompute": "none"})))
    assert "tests." not in text
    load(text)


# A share of the programs and graphs


@needs_torch(2, 13, "has shape rules that refuse what eager takes: scatter_reduce of no axes")
@pytest.mark.parametrize("seed", slow_but_every(2, range(10)))
def test_random_programs_train_as_in_eager(seed: int) -> None:
    """One test per seed, so that all processes share them; `make fuzz ARGS="--programs 1 --seed 7"` shrinks seed 7."""
    case = judged(seed)
    assert not case.verdict.is_finding, f"{case.verdict.detail}\n{script(case)}"


@pytest.mark.parametrize("seed", range(13))
def test_random_graphs_equal_the_reference(seed: int) -> None:
    assert not difference(draw_graph(seed))
