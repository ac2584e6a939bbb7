"""Small programs as one compiled function: correct for each op with an emitter and each size, and only if allowed."""

import copy
import ctypes
import gc
import importlib
import itertools
import pathlib
import re
import time
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule
from onnxtrain.errors import GraphError
from onnxtrain.execute.cpp_program import program as cpp_program
from onnxtrain.execute.cpp_program.call import ENTRY, Call, compiled_call, python_call
from onnxtrain.execute.cpp_program.source import NAME, Function, emit_function
from onnxtrain.execute.cpp_program.static_graph import StaticGraph, static_graph
from onnxtrain.execute.program import Program, Run
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.native import Library
from onnxtrain.native.compiler import has_torch_headers
from onnxtrain.ops.interfaces.cpp import UnsupportedError
from onnxtrain.testing import assert_no_worse_than_eager
from tests.limits import WAIT_LIMIT_S
from tests.op_case import CaseCheck, OpCase
from tests.reference import assert_matches

pytestmark = pytest.mark.compiler

Form = Callable[[Call, Run], Run]
FORMS = [
    pytest.param(compiled_call, marks=pytest.mark.skipif(not has_torch_headers(), reason="needs Python's headers")),
    python_call,
]


@pytest.fixture(scope="module", autouse=True)
def entry() -> None:
    """Compile entry.cpp before any test waits for a call: it takes 10 s, once per machine."""
    assert ENTRY.wait() == has_torch_headers(), ENTRY.failure


CASES: list[OpCase] = [
    case
    for path in sorted((pathlib.Path(__file__).parent.parent / "ops").glob("cases_*.py"))
    for case in importlib.import_module(f"tests.ops.{path.stem}").CASES
]


class Written:
    """A program, and its compiled function for one set of sizes."""

    def __init__(self, program: Program, shapes: Sequence[tuple[int, ...]], sizes_in: Sequence[int]) -> None:
        self.program, self.shapes, self.declined = program, shapes, 0
        self.static: StaticGraph = static_graph(program.part, shapes, sizes_in)
        self.function: Function = emit_function(self.static.graph, self.static.passed_through)

    def use(self, library: Any, name: str, form: Form) -> None:
        """Run the function in place of the program; counts calls that it does not take because of their strides."""
        run = self.program.run

        def ordinary(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
            self.declined += 1
            return run(tensors, sizes_in)

        function = getattr(library, name)
        self.program.run = form(
            Call.from_function(self.program.part, self.static, self.shapes, self.function, function), ordinary
        )


def written(check: CaseCheck, symbol_values: Any) -> list[Written]:
    """The functions of the programs that a check runs at these sizes, except those without an emitter."""
    check.check_sizes(symbol_values)
    programs = [check.forward, *(p for entry in check.__dict__.get("_programs", {}).values() for p in entry[2:])]
    seen: list[tuple[Program, list[tuple[int, ...]], tuple[int, ...]]] = []
    before = [program.run for program in programs]

    def spy(program: Program, run: Any) -> Any:
        def record(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
            tensors = list(tensors)
            seen.append((program, [tuple(t.shape) for t in tensors], tuple(sizes_in)))
            return run(tensors, sizes_in)

        return record

    for program, run in zip(programs, before, strict=True):
        program.run = spy(program, run)
    check.check_sizes(symbol_values)
    for program, run in zip(programs, before, strict=True):
        program.run = run
    cases = []
    for program, shapes, sizes_in in seen:
        try:
            if cpp_program.may_be_cpp_program(program.part, min_nodes=1):
                cases.append(Written(program, shapes, sizes_in))
        except (UnsupportedError, GraphError):
            continue
    return cases


def check_cases(cases: Sequence[OpCase], dtype: torch.dtype, form: Form) -> int:
    """Run the functions of these cases in place of their programs; returns how many took the call."""
    runs: list[tuple[CaseCheck, Any, list[Written], int]] = []
    texts, signatures, count = [], {}, 0
    for case in cases:
        check = CaseCheck(case, dtype)
        for symbol_values in list(case.size_sets())[:2]:
            written_functions = written(check, symbol_values)
            runs.append((check, symbol_values, written_functions, count))
            for one in written_functions:
                name = f"{NAME}_{count}"
                texts.append(re.sub(rf"\b{NAME}\(", f"{name}(", one.function.text))
                signatures[name] = "p"
                count += 1
    function = Function("\n".join(texts), (), ())
    library = Library("cpp-program-test", function.source, signatures, keeps_gil=True)
    assert library.wait(), library.failure
    for check, symbol_values, written_functions, first in runs:
        before = [one.program.run for one in written_functions]
        for number, one in enumerate(written_functions, first):
            one.use(library.functions, f"{NAME}_{number}", form)
        check.check_sizes(symbol_values)
        for one, run in zip(written_functions, before, strict=True):
            one.program.run = run
    return sum(not one.declined for _, _, written_functions, _ in runs for one in written_functions)


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_of_the_ops(form: Form) -> None:
    assert check_cases(CASES[::23], torch.float32, form) > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("part", range(8))
def test_every_op_that_has_an_emitter(part: int, dtype: torch.dtype) -> None:
    assert check_cases(CASES[part::8], dtype, compiled_call) > 20


ELEMENTS = {"float": torch.float32, "double": torch.float64, "int64_t": torch.int64}


def library_of(texts: Sequence[str]) -> Any:
    """The compiled functions `run_0`, `run_1`, … of these definitions."""
    signatures = {f"{NAME}_{i}": "p" for i in range(len(texts))}
    library = Library("cpp-program-test", Function("\n".join(texts), (), ()).source, signatures, keeps_gil=True)
    assert library.wait(), library.failure
    return library.functions


@pytest.mark.parametrize("c_type", ["float", "double"])
def test_gemms_with_and_without_remainders(c_type: str) -> None:
    """Full tiles, full vectors and single columns. Sums of small integers are exact in any order."""
    sizes = [(m, n, k) for m in (1, 4, 7) for n in (1, 8, 16, 31, 32, 45, 80) for k in (1, 9)]
    texts = [
        f'extern "C" void {NAME}_{i}(void* const* p) {{ gemm<{c_type}, {m}, {n}, {k}, 1, {m}, {n + 2}, {n}>'
        f"((const {c_type}*)p[0], (const {c_type}*)p[1], ({c_type}*)p[2]); }}"
        for i, (m, n, k) in enumerate(sizes)
    ]
    functions, dtype = library_of(texts), ELEMENTS[c_type]
    for i, (m, n, k) in enumerate(sizes):
        a, b = torch.randint(-9, 10, (k, m)).to(dtype).t(), torch.randint(-9, 10, (k, n + 2)).to(dtype)[:, :n]
        product = torch.full((m + 1, n), -1, dtype=dtype)
        getattr(functions, f"{NAME}_{i}")((ctypes.c_void_p * 3)(a.data_ptr(), b.data_ptr(), product.data_ptr()))
        assert torch.equal(product[:m], a @ b), sizes[i]
        assert (product[m] == -1).all(), "written past the end"


def test_transposed_matrices() -> None:
    """Full blocks and remainders, of each element type, also from rows with a gap between them."""
    sizes = [(1, 1), (3, 5), (16, 16), (17, 33), (40, 7), (8, 64), (63, 18)]
    kinds = [(c_type, r, c, r + gap) for c_type in ELEMENTS for r, c in sizes for gap in (0, 3)]
    texts = [
        f'extern "C" void {NAME}_{i}(void* const* p) '
        f"{{ transpose<{c_type}, {r}, {c}, {stride}>((const {c_type}*)p[0], ({c_type}*)p[1]); }}"
        for i, (c_type, r, c, stride) in enumerate(kinds)
    ]
    functions = library_of(texts)
    for i, (c_type, r, c, stride) in enumerate(kinds):
        matrix = torch.arange(c * stride).to(ELEMENTS[c_type]).view(c, stride)
        transposed = torch.full((r + 1, c), -1, dtype=matrix.dtype)
        getattr(functions, f"{NAME}_{i}")((ctypes.c_void_p * 2)(matrix.data_ptr(), transposed.data_ptr()))
        assert torch.equal(transposed[:r], matrix[:, :r].t()), kinds[i]
        assert (transposed[r] == -1).all(), "written past the end"


# In a module


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))


def with_transposed_weight() -> nn.Module:
    model = mlp(nn.ReLU())
    model[0].weight = nn.Parameter(torch.randn(6, 8).t())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: mlp(nn.ReLU()),
    "tanh": lambda: mlp(nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid()),
    "gelu": lambda: mlp(nn.GELU(approximate="tanh"), nn.Linear(8, 8), nn.SiLU()),
    "transposed weight": with_transposed_weight,
    "wide": lambda: mlp(nn.ReLU(), nn.Linear(8, 40), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 8)),
}


def step(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    leaf = x.detach().clone().requires_grad_()
    output = module(leaf)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    assert leaf.grad is not None
    return [output.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[cpp_program.CppProgram]:
    """Collect every program that may be compiled; the compiled function always counts as faster."""
    programs: list[cpp_program.CppProgram] = []
    watch = cpp_program.watch

    def noted(program: Program) -> None:
        cpp = watch(program)
        if cpp is not None:
            programs.append(cpp)

    monkeypatch.setattr(cpp_program, "watch", noted)
    monkeypatch.setattr(cpp_program, "_is_faster", lambda call, ordinary: True)
    return programs


def settle(module: nn.Module, x: torch.Tensor, calls: Sequence[cpp_program.CppProgram], count: int) -> None:
    """Step until this many programs are settled."""
    end = time.monotonic() + WAIT_LIMIT_S
    while sum(call.settled for call in calls) < count:
        step(module, x)
        assert time.monotonic() < end, "nothing is compiled"


@pytest.mark.parametrize("name", MODELS)
def test_a_module_trains_with_compiled_calls(name: str, calls: list[cpp_program.CppProgram]) -> None:
    torch.manual_seed(0)
    eager = MODELS[name]()
    exact = copy.deepcopy(eager).double()
    module = ORTModule(copy.deepcopy(eager))
    settle(module, torch.randn(5, 6), calls, 2)
    for rows in (5, 1, 7, 5):  # sizes other than 5 run the ordinary program
        x = torch.randn(rows, 6)
        for got, expected, true in zip(step(module, x), step(eager, x), step(exact, x.double()), strict=True):
            assert_no_worse_than_eager(f"{name} {rows}", got, expected, true)
    assert engine_of(module).captures == 1


def test_outputs_are_not_overwritten_by_the_next_call(calls: list[cpp_program.CppProgram]) -> None:
    """The function's own memory is static; its outputs are not."""
    module = ORTModule(mlp(nn.ReLU()))
    settle(module, torch.randn(5, 6), calls, 2)
    runs = [(step(module, x), x) for x in torch.randn(3, 5, 6)]
    for results, x in runs:
        for kept, again in zip(results, step(module, x), strict=True):
            torch.testing.assert_close(kept, again, rtol=0, atol=0)


def test_two_forwards_before_backward(calls: list[cpp_program.CppProgram]) -> None:
    eager = mlp(nn.ReLU())
    module = ORTModule(copy.deepcopy(eager))
    x, y = torch.randn(2, 5, 6)
    settle(module, x, calls, 2)

    def accumulated(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
        module.zero_grad()
        first, second = module(x), module(y)
        for output in (second, first):
            output.backward(torch.linspace(-1, 1, 15, dtype=output.dtype).view(5, 3))
        return [p.grad for p in module.parameters()]

    assert_matches(accumulated(module, x, y), accumulated, eager, x, y)


class Returns(nn.Module):
    def __init__(self, compute: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.compute = compute

    def forward(self, x: torch.Tensor) -> Any:
        return self.compute(x, self.linear(x).relu() * 2)


@pytest.mark.parametrize(
    "compute",
    [lambda x, y: (y, y.view(-1)), lambda x, y: (y * 2, x.view(-1)), lambda x, y: y * torch.rand(6)],
    ids=["a view of another result", "a view of an input", "random"],
)
def test_programs_that_are_not_compiled(compute: Callable[..., Any], calls: list[cpp_program.CppProgram]) -> None:
    module = ORTModule(Returns(compute))
    results = module(torch.randn(5, 6))
    forward = engine_of(module).newest().unit.forward
    assert not any(call._program is forward for call in calls)
    del results


@pytest.mark.parametrize("options", [{"rng": "torch"}, {"kernels": "pytorch"}], ids=str)
def test_options_that_disable_compiled_calls(options: dict[str, Any], calls: list[cpp_program.CppProgram]) -> None:
    step(ORTModule(mlp(nn.ReLU()), **options), torch.randn(5, 6))
    assert not calls


def test_nothing_is_compiled_if_results_must_be_bitwise_equal(calls: list[cpp_program.CppProgram]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        step(ORTModule(mlp(nn.ReLU())), torch.randn(5, 6))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not calls


def test_the_slower_of_the_two_is_dropped(calls: list[cpp_program.CppProgram], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_program, "_is_faster", lambda call, ordinary: False)
    module = ORTModule(mlp(nn.ReLU()))
    settle(module, torch.randn(5, 6), calls, 2)
    assert all(call._program.run is call._ordinary for call in calls)


@pytest.mark.parametrize(
    ("compiled", "ordinary", "num_calls", "winner"),
    [
        ([9, 1], [9, 2], 11, "compiled"),  # the first calls are slow
        ([9, 2], [9, 1], 12, "ordinary"),
        ([1, 2, 1, 2], [2, 1, 1, 2], 40, "ordinary"),
    ],
)
def test_a_clear_difference_ends_the_trial_early(
    compiled: list[int], ordinary: list[int], num_calls: int, winner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0
    monkeypatch.setattr(cpp_program.time, "perf_counter", lambda: clock)

    def taking(seconds: list[int]) -> Any:
        times = itertools.chain(seconds, itertools.cycle(seconds[-2:] if len(seconds) > 2 else seconds[-1:]))

        def run(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
            nonlocal clock
            clock += next(times)
            return (), ()

        return run

    runs = {"compiled": taking(compiled), "ordinary": taking(ordinary)}
    program: Any = types.SimpleNamespace(run=runs["ordinary"], filename="a program")
    trial = cpp_program.CppProgram(program)
    trial.call = runs["compiled"]
    calls = 0
    while not trial.settled:
        trial._timing([], ())
        calls += 1
    assert (calls, program.run) == (num_calls, runs[winner])


def test_large_tensors_are_not_counted(calls: list[cpp_program.CppProgram]) -> None:
    module = ORTModule(nn.Sequential(nn.Linear(600, 600), nn.ReLU()))
    step(module, torch.randn(4, 600))
    assert calls
    assert all(call._program.run is call._ordinary for call in calls)


def test_a_broken_compiler_leaves_the_ordinary_program(
    calls: list[cpp_program.CppProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def wait(library: Library, seconds: float | None = None) -> bool:
        asked.append(library)
        return False

    monkeypatch.setattr(Library, "wait", wait)
    module = ORTModule(mlp(nn.ReLU()))
    end = time.monotonic() + WAIT_LIMIT_S
    while len(asked) < 2:
        step(module, torch.randn(5, 6))
        assert time.monotonic() < end
    assert all(call._program.run is call._ordinary for call in calls)


# The function that replaces a program


def linear_call(form: Form, ordinary: Run) -> Run:
    """2 * a + b of three floats each, with a size that must be 7; also returns None and a."""
    source = """
extern "C" void run(void* const* p) {
    for (int i = 0; i < 3; ++i) ((float*)p[2])[i] = 2 * ((const float*)p[0])[i] + ((const float*)p[1])[i];
}
"""
    library = Library("cpp-program-test", source, {NAME: "p"}, keeps_gil=True)
    assert library.wait(), library.failure
    kind = ((3,), torch.float32)
    function = getattr(library.functions, NAME)
    return form(
        Call(
            function, (kind, kind), frozenset({0, 1}), (0, 1), (kind,), (0, None, -1), sizes_in=(7,), sizes_out=(5, 6)
        ),
        ordinary,
    )


def refuse(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
    raise AssertionError("an ordinary call")


def hand_on(tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
    return "ordinary", list(tensors), list(sizes_in)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [tuple, list, iter])
def test_tensors_in_any_iterable(form: Form, kind: Callable[[Any], Any]) -> None:
    run = linear_call(form, refuse)
    a, b = torch.randn(2, 3)
    for sizes_in in ((7,), [7]):
        (y, nothing, same), sizes = run(kind((a, b)), sizes_in)
        assert torch.equal(y, 2 * a + b)
        assert nothing is None
        assert same is a
        assert sizes == (5, 6)


class Subclass(torch.Tensor):
    pass


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "shape": lambda: torch.ones(4),
    "rank": lambda: torch.ones(3, 1),
    "strides": lambda: torch.ones(6)[::2],
    "negative": lambda: torch._neg_view(torch.ones(3)),
}
ONLY_COMPILED: dict[str, Callable[[], torch.Tensor]] = {
    "dtype": lambda: torch.ones(3, dtype=torch.float64),
    "device": lambda: torch.ones(3, device="meta"),
    "layout": lambda: torch.ones(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Subclass),
    "no tensor": lambda: None,  # type: ignore[dict-item, return-value]  # the entry must not read it as a tensor
}


@pytest.mark.parametrize(
    ("form", "other"),
    [
        *(pytest.param(form, other, id=f"{form}-{other}") for form in ("compiled", "python") for other in OTHERS),
        *(pytest.param("compiled", other) for other in ONLY_COMPILED),
    ],
)
def test_other_arguments_run_the_ordinary_program(form: str, other: str) -> None:
    if form == "compiled" and not has_torch_headers():
        pytest.skip("needs Python's headers")
    run = linear_call(compiled_call if form == "compiled" else python_call, hand_on)
    tensor, plain = {**OTHERS, **ONLY_COMPILED}[other](), torch.ones(3)
    for tensors in ((tensor, plain), (plain, tensor)):
        name, received, sizes_in = run(iter(tensors), (7,))
        assert name == "ordinary"
        assert all(a is b for a, b in zip(received, tensors, strict=True))
        assert sizes_in == [7]


@pytest.mark.parametrize("form", FORMS)
def test_other_sizes_run_the_ordinary_program(form: Form) -> None:
    run = linear_call(form, hand_on)
    assert run(iter(torch.ones(2, 3)), (8,))[0] == "ordinary"
    assert run(iter(torch.ones(2, 3)), (7,))[0] != "ordinary"


@pytest.mark.parametrize("form", FORMS)
def test_a_profiler_sees_the_nodes(form: Form) -> None:
    run = linear_call(form, hand_on)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert run(iter(torch.ones(2, 3)), (7,))[0] == "ordinary"


@pytest.mark.parametrize("form", FORMS)
def test_errors_of_the_ordinary_program_are_raised(form: Form) -> None:
    run = linear_call(form, refuse)
    with pytest.raises(AssertionError, match="an ordinary call"):
        run(iter(torch.ones(2, 3)), (8,))
    with pytest.raises(TypeError):
        run(None, (7,))  # type: ignore[arg-type]  # no tensors


@pytest.mark.parametrize("form", FORMS)
def test_an_unreachable_call_is_collected(form: Form) -> None:
    """The program and its call reference each other: the garbage collector must see the cycle."""

    class Holder:
        run: Any

        def ordinary(self, tensors: Iterable[torch.Tensor], sizes_in: Sequence[int]) -> Any:
            raise AssertionError

    holder = Holder()
    holder.run = linear_call(form, holder.ordinary)
    (y, _, _), _ = holder.run(torch.ones(2, 3), (7,))
    gone, result = weakref.ref(holder), weakref.ref(y)
    del holder, y
    gc.collect()
    assert gone() is None
    assert result() is None


def test_without_the_cpp_entry_calls_are_in_python(
    calls: list[cpp_program.CppProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENTRY, "wait", lambda: False)
    torch.manual_seed(0)
    eager = mlp(nn.ReLU())
    exact, module = copy.deepcopy(eager).double(), ORTModule(copy.deepcopy(eager))
    settle(module, torch.randn(5, 6), calls, 2)
    assert all(isinstance(call.call, types.FunctionType) for call in calls if call.settled)
    x = torch.randn(5, 6)
    for got, expected, true in zip(step(module, x), step(eager, x), step(exact, x.double()), strict=True):
        assert_no_worse_than_eager("python", got, expected, true)
