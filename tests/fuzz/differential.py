"""Train a program for two steps in onnxtrain and in eager PyTorch, and judge the results by the one tolerance."""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import math
import re
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from onnxtrain import FallbackPolicy, ORTModule, prepare
from onnxtrain.capture.key import executed_code
from onnxtrain.errors import MemoryBudgetError, ORTModuleFallbackException
from onnxtrain.execute.tolerance import error_and_bound
from tests.fuzz.configurations import Configuration
from tests.fuzz.programs import Program
from tests.fuzz.regions import made_up_compiler

STEPS = 2
aten = torch.ops.aten

# Programs that run in PyTorch, as docs/reference/supported.md says: what the error says, what the program has, and the
# reason in the table of what was run. Nothing else is taken for a refusal, and each is counted.
DOCUMENTED = (
    (
        "changes a tensor in place where autograd does not see it, and a gradient flows through it",
        r"no_grad|detach|\.data\b|\.view\(torch\.|[dD]ropout",  # without gradients, dropout gives its argument itself
        "in place where autograd does not see it",
    ),
    (
        "is a view and its base or another view of its base has been modified inplace",
        r"(split|chunk|unbind)[\s\S]*\.data\b",
        "one output of split, chunk or unbind is changed through .data",
    ),
    ("changes a parameter", r"\.data\b|no_grad|detach|\.view\(torch\.", "a parameter is changed"),
    ("branches in Python on tensor values", "gaussian_nll_loss", "F.gaussian_nll_loss decides by elements in Python"),
    ("PendingUnbackedSymbolNotFound", "torch.combinations", "torch.combinations"),
    (
        "changes the shape or strides of its argument",
        r"\.(t|squeeze|unsqueeze|transpose|swapaxes)_\(",
        "the shape of an argument changes in place",
    ),
    ("detaches its argument in place", r"\.detach_\(", "an argument is detached in place"),
    (
        "writes a value that has a gradient into a buffer or an input",
        "_\\(|\\] [-+*/]?= |[-+*/]= |inplace=True",
        "a value with a gradient is written into a buffer or an input",
    ),
    (
        "A view was created in no_grad mode and its base",
        "_\\(|\\] [-+*/]?= |[-+*/]= |inplace=True",
        "a value with a gradient is written into an input of which a view was taken",
    ),
    ("Output size is too small", "conv_transpose", "a transposed convolution of no elements"),
    (
        "the graph cannot compute the size",
        "interpolate",
        "slices with a step of what interpolate resizes by a fraction",
    ),
    ("a tensor being mutated that has internal overlap", "unfold|expand|broadcast|meshgrid", "overlapping views"),
    ("forward writes to a view made by unfold", "unfold", "writes through unfold"),
    (
        "Dimension out of range",
        r"\.(squeeze|unsqueeze)_\(",
        "the shape of a tensor changes in place after a view of it was taken",
    ),
    ("written-to tensor refers to a single memory location", "unfold|expand|broadcast|meshgrid", "overlapping views"),
    ("elements overlap in memory", "unfold|expand|broadcast|meshgrid", "overlapping views"),
    ("that is not contiguous with normal_", "normal_", "normal_ of strided memory"),
    ("tried to directly modify sizes for customized tensor", r"\.fft\.", "a Fourier transform of one element"),
    ("enable_grad() inside torch.no_grad()", "enable_grad", "enable_grad() inside no_grad()"),
    ("of a non-contiguous tensor: strides differ", "as_strided", "torch.as_strided"),
    ("expected scalar type", "einsum", "torch.einsum of several dtypes"),
    (
        "linalg.vector_norm cannot compute the inf norm",
        "vector_norm|norm",
        "linalg.vector_norm of no elements by a negative dim",
    ),
)

Named = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """The result of a program.

    Attributes:
        kind: "equal", "refused" (for a documented reason), "discarded" (PyTorch cannot run it), "unstable" (eager's own
            result moves as far when the inputs move by some roundings); or a finding: "wrong", "error", "hang",
            "crash".
        detail: the error, or what differs.
    """

    kind: str
    detail: str = ""

    @property
    def is_finding(self) -> bool:
        return self.kind in ("wrong", "error", "hang", "crash")

    @property
    def signature(self) -> str:
        """The part of the result that shrinking a program must preserve."""
        first = self.detail.strip().splitlines()[0] if self.detail.strip() else ""
        if self.kind == "wrong":  # by what is wrong, not by how far
            first = re.sub(r"^call \d+: (gradient|[a-z_ ]+).*", r"\1", first)
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', first)[:90]}"


def judge(program: Program, configuration: Configuration) -> Verdict:
    """Run a program in eager PyTorch, in float64 and in onnxtrain."""
    if not program.outputs:
        return Verdict("discarded", "no outputs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _judge(program, configuration)


def _judge(program: Program, configuration: Configuration) -> Verdict:
    try:
        sides = Sides(program, configuration)
        eager = sides.eager()
    except Exception as error:  # noqa: BLE001  # whatever PyTorch raises
        return Verdict("discarded", f"{type(error).__name__}: {error}")
    try:
        exact = sides.exact()
    except Exception as error:  # noqa: BLE001  # an operator that float64 lacks, or dtypes that the program fixes
        return Verdict("discarded", f"in float64: {type(error).__name__}: {error}")
    if difference := sides.structure(eager, exact):
        return Verdict("discarded", f"in float64: {difference}")
    fast = configuration.options.get("rng") == "fast"
    for attempt in range(2 if configuration.cached else 1):
        try:
            got = sides.ours()
        except ORTModuleFallbackException as error:
            reason = _documented(str(error), program)
            return Verdict("refused", reason) if reason else Verdict("error", _described(error))
        except MemoryBudgetError:
            return Verdict("refused", "memory budget")
        except Exception as error:  # noqa: BLE001  # every error of onnxtrain's is a finding
            return Verdict("error", _described(error))
        if fast and (sides.draws(eager) or sides.draws(got)):  # other random numbers: the same form, and the same twice
            again = sides.ours()  # with kernels that the first run compiled
            difference = sides.structure(eager, got) or (
                _difference(again, got, got) and _difference(sides.ours(), again, again)
            )
            return Verdict("wrong", f"with rng=fast: {difference}") if difference else Verdict("equal")
        if difference := _difference(got, eager, exact):
            if sides.overwrites_saved_tensors():
                return Verdict("discarded", "eager's backward reads a tensor that forward overwrote unseen by autograd")
            if sides.moves(eager, exact, got):
                return Verdict("unstable", difference)
            return Verdict("wrong", f"{difference}{' from the cache' if attempt else ''}")
    return Verdict("equal")


def _documented(error: str, program: Program) -> str | None:
    source = program.source()
    return next((why for text, cause, why in DOCUMENTED if text in error and re.search(cause, source)), None)


def _described(error: BaseException) -> str:
    """The error with the last lines of its traceback."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}")
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}\n    " + "\n    ".join(frames[-12:])


class Sides:
    """The sides of a comparison: each trains the same parameters, which eager's gradients change after a step."""

    def __init__(self, program: Program, configuration: Configuration) -> None:
        self.program, self.configuration = program, configuration
        self.blocks = configuration.entry == "regional"
        self.cache: tempfile.TemporaryDirectory[str] | None = None
        self.states: list[dict[str, torch.Tensor]] = []
        self.wait: Callable[[], None] = lambda: None

    def eager(self) -> list[Named]:
        model = load(self.program.source(self.blocks))()
        self.states = [_parameters(model)]
        return self._train(model, model)

    def exact(self, noise: int | None = None) -> list[Named]:
        """Run in float64; with `noise`, inputs and parameters are perturbed by some rounding errors."""
        torch.set_default_dtype(torch.float64)
        try:
            model = load(_in_float64(self.program.source(self.blocks)))().double()
            return self._train(model, model, torch.float64, noise)
        finally:
            torch.set_default_dtype(torch.float32)

    def moved(self, noise: int) -> list[Named]:
        """Run eager with its inputs, parameters and operator results perturbed by some rounding errors."""
        model = load(self.program.source(self.blocks))()
        with _Rounding(noise):
            return self._train(model, model, noise=noise)

    def ours(self) -> list[Named]:
        """Run in onnxtrain, from the cache if it is filled; a budget that is too small becomes the smallest one."""
        for _ in range(STEPS):
            try:
                return self._ours()
            except MemoryBudgetError as error:
                least = re.search(r"(\d+) bytes or more", str(error))
                if least is None:
                    raise
                options = {**self.configuration.options, "memory_budget_bytes": int(least[1])}
                self.configuration = replace(self.configuration, options=options)
        return self._ours()

    def _ours(self) -> list[Named]:
        options: dict[str, Any] = {
            "rng": "torch",
            "fallback_policy": FallbackPolicy.FALLBACK_DISABLE,
            "log_level": "ERROR",
        }
        options |= self.configuration.options
        source = self.program.source(self.blocks)
        with contextlib.ExitStack() as stack:
            if self.configuration.regions:
                self.wait = stack.enter_context(made_up_compiler())
            if self.configuration.cached:
                self.cache = self.cache or tempfile.TemporaryDirectory(prefix="fuzz-")
                options["cache_dir"] = self.cache.name
                model = stack.enter_context(_in_file(source, self.cache.name))()
            else:
                model = load(source)()
            if self.configuration.entry == "module":
                return self._train(ORTModule(model, **options), model)
            regional = self.configuration.entry == "regional"
            return self._train(prepare(model, regional=regional, **options), model)

    def _train(
        self, run: torch.nn.Module, model: torch.nn.Module, dtype: torch.dtype | None = None, noise: int | None = None
    ) -> list[Named]:
        results = []
        for step in range(STEPS):
            first = len(self.states) <= step
            if step and first:  # eager, the first time
                self.states.append(_updated(model))
            _load_parameters(model, _noisy(self.states[step], noise))
            if self.configuration.evaluates and step:
                results.append(self._evaluate(run, dtype))
            inputs = self._inputs(step, dtype, noise)
            results.append(_step(run, model, inputs, step, self.configuration.one_gradient and step == 1))
            self.wait()
        return results

    def _inputs(self, step: int, dtype: torch.dtype | None, noise: int | None) -> list[torch.Tensor]:
        inputs = self.program.call(step)
        moved = _noisy({str(i): t.detach() for i, t in enumerate(inputs)}, noise)
        return [
            t.to(dtype if dtype is not None and t.is_floating_point() else i.dtype)
            .detach()
            .requires_grad_(i.requires_grad)
            for t, i in zip(moved.values(), inputs, strict=True)
        ]

    def _evaluate(self, run: torch.nn.Module, dtype: torch.dtype | None) -> Named:
        run.eval()
        torch.manual_seed(3)
        with torch.no_grad():
            outputs = pytree.tree_leaves(run(*self._inputs(0, dtype, None)))
        run.train()
        return {f"output {i} in eval mode": _plain(o) for i, o in enumerate(outputs)}

    def structure(self, eager: Sequence[Named], exact: Sequence[Named]) -> str:
        """Describe how the structure of float64's results differs from eager's."""
        for theirs, right in zip(eager, exact, strict=True):
            if theirs.keys() != right.keys():
                return "other results"
            for name, t in theirs.items():
                r = right[name]
                if (t is None) != (r is None) or (isinstance(t, torch.Tensor) and t.shape != r.shape):
                    return f"{name} has another form"
        return ""

    def draws(self, calls: Sequence[Named]) -> bool:
        """Whether these calls sampled random numbers; onnxtrain samples a seed for dropout of no elements, too."""
        states = [call["random state"] for call in calls if "random state" in call]
        return any(not torch.equal(torch.manual_seed(n).get_state(), state) for n, state in enumerate(states))

    def overwrites_saved_tensors(self) -> bool:
        """Whether forward changes a tensor that eager saved for backward, by `.data` or `detach()`: no derivative."""
        overwritten = False

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tensor, tensor.detach().clone()

        def unpack(saved: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            nonlocal overwritten
            overwritten = overwritten or _changed(*saved)
            return saved[0]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            self.eager()
        return overwritten

    def moves(self, eager: Sequence[Named], exact: Sequence[Named], got: Sequence[Named]) -> bool:
        """Whether eager's results change by as much as our error if inputs are perturbed by some rounding errors."""
        spread: dict[tuple[int, str], float] = {}
        for noise in range(6):
            for make, still in ((self.exact, exact), (self.moved, eager)):
                try:
                    perturbed = make(noise)
                except Exception:  # noqa: BLE001  # a size that depends on elements, for example
                    return True
                for step, (f, s) in enumerate(zip(perturbed, still, strict=True)):
                    for name, t in s.items():
                        if isinstance(t, torch.Tensor):
                            far = _distance(f[name], t)
                            spread[step, name] = max(spread.get((step, name), 0.0), far)
        wrong = [(k, n) for k, (g, e, x) in enumerate(zip(got, eager, exact, strict=True)) for n in _wrong(g, e, x)]
        return all(_distance(got[k].get(n), exact[k].get(n)) <= 4 * spread.get((k, n), 0.0) for k, n in wrong)


class _Rounding(TorchDispatchMode):
    """Multiplies each element of each operator's result by 1 + eps or 1 - eps at random.

    Views and results that are written in place stay as they are. A result whose terms cancel shows its own rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable or func in _EXACT:
            return results
        return pytree.tree_map_only(torch.Tensor, self._rounded, results)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout != torch.strided:
            return tensor
        signs = torch.randint(0, 2, tensor.shape, generator=self._generator).to(tensor.dtype) * 2 - 1
        return tensor.mul_(1 + torch.finfo(tensor.dtype).eps * signs)


# Results that are not rounded numbers, or share an argument's memory.
_EXACT = frozenset({
    *(op.default for op in (aten._reshape_alias, aten.lift_fresh, aten.clone, aten.zeros_like, aten.ones_like)),
})  # fmt: skip


def _distance(a: Any, b: Any) -> float:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    a, b = a.double(), b.double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
        return math.inf
    return (a - b)[finite].abs().max().item() if finite.any() else 0.0


def _noisy(tensors: Mapping[str, torch.Tensor], noise: int | None) -> dict[str, torch.Tensor]:
    """Perturb floating-point tensors by some rounding errors of their dtype; float32 becomes float64, to hold them."""
    if noise is None:
        return dict(tensors)
    generator = torch.Generator().manual_seed(noise)
    return {
        name: _wider(t) * (1 + 4 * torch.finfo(t.dtype).eps * torch.randn(t.shape, generator=generator).to(_wider(t)))
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def _step(
    run: torch.nn.Module, model: torch.nn.Module, inputs: list[torch.Tensor], step: int, one_gradient: bool
) -> Named:
    """Outputs, gradients and buffers, and inputs that forward changed."""
    model.zero_grad(set_to_none=True)
    given = [t.detach().clone() for t in inputs]
    torch.manual_seed(step)
    outputs = pytree.tree_leaves(run(*inputs))
    drawn = torch.get_rng_state()
    results: dict[str, Any] = {}
    pairs = []
    generator = torch.Generator().manual_seed(5)
    for number, output in enumerate(outputs):
        results[f"output {number}"] = _plain(output)
        results[f"requires_grad of output {number}"] = isinstance(output, torch.Tensor) and output.requires_grad
        if isinstance(output, torch.Tensor) and output.requires_grad:
            pairs.append((output, torch.randn(output.shape, generator=generator, dtype=torch.float).to(output.dtype)))
    pairs = pairs[-1:] if one_gradient else pairs
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    results |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    results |= {f"gradient of input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
    results |= {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    results |= {f"input {i}": t.detach() for i, (t, g) in enumerate(zip(inputs, given, strict=True)) if _changed(t, g)}
    return results | {"random state": drawn}


def _changed(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    return tensor.shape != before.shape or not torch.equal(tensor.detach().nan_to_num(), before.nan_to_num())


def _plain(output: Any) -> Any:
    return output.detach().clone() if isinstance(output, torch.Tensor) else output


def _difference(got: Sequence[Named], eager: Sequence[Named], exact: Sequence[Named]) -> str:
    texts = [
        f"call {call}: {text}"
        for call, sides in enumerate(zip(got, eager, exact, strict=True))
        for text in _wrong(*sides).values()
    ]
    return "\n".join(texts[:6])


def _wrong(got: Named, eager: Named, exact: Named) -> dict[str, str]:
    """The results that are out of tolerance, by name."""
    if got.keys() != eager.keys():
        return {"": f"results {sorted(got.keys() ^ eager.keys())} on one side only"}
    messages = {}
    for name, theirs in eager.items():
        mine = got[name]
        if not isinstance(theirs, torch.Tensor) or not isinstance(mine, torch.Tensor):
            if mine is not theirs and not (isinstance(theirs, (bool, int, float)) and mine == theirs):
                messages[name] = f"{name}: {_short(mine)}, eager has {_short(theirs)}"
        elif mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            messages[name] = f"{name}: {mine.dtype} {tuple(mine.shape)}, eager has {theirs.dtype} {tuple(theirs.shape)}"
        elif theirs.numel():
            error, allowed, scale = error_and_bound(mine, theirs, exact[name], largest_gradient(name, exact))
            if not error <= allowed:
                messages[name] = f"{name}: error {error:.3e}, allowed {allowed:.3e} (scale {scale:.3e})"
    return messages


def largest_gradient(name: str, exact: Named) -> float:
    """The largest element of all gradients, where `name` is one of them."""
    if not name.startswith("gradient"):
        return 0.0
    scales = [x.abs().max().item() for n, x in exact.items() if "gradient of" in n and x is not None and x.numel()]
    return max((s for s in scales if math.isfinite(s)), default=0.0)


def _short(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


# Programs as modules


def load(source: str) -> type[torch.nn.Module]:
    """Load the class `Program` from a source that tracebacks can show."""
    name = f"<program {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {"__name__": "fuzzed_program"}
    sys.modules.setdefault("fuzzed_program", types.ModuleType("fuzzed_program"))
    exec(compile(source, name, "exec"), scope)
    program_class: type[torch.nn.Module] = scope["Program"]
    return program_class


@contextlib.contextmanager
def _in_file(source: str, folder: str) -> Iterator[type[torch.nn.Module]]:
    """The class of a module in a file, as captures on the disk need it: older than this process, as it pretends."""
    path = Path(folder, "fuzzed_program_in_file.py")
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    before, executed_code._process_start = executed_code._process_start, lambda: math.inf
    try:
        spec.loader.exec_module(module)
        yield module.Program
    finally:
        executed_code._process_start = before
        del sys.modules[path.stem]


_WIDER = (
    ("torch.float32", "torch.float64"),
    ('torch.autocast("cpu", torch.bfloat16)', 'torch.autocast("cpu", enabled=False)'),
    ("torch.bfloat16", "torch.float64"),
    (".float()", ".double()"),
    (".bfloat16()", ".double()"),
    ("dtype=torch.float)", "dtype=torch.float).double()"),
)


def _in_float64(source: str) -> str:
    for narrow, wide in _WIDER:
        source = source.replace(narrow, wide)
    return source


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _updated(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters after a short step along their gradients."""
    values = _parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            values[name] -= 0.1 * parameter.grad.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
    return values


def _load_parameters(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
