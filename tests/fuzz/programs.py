"""Sample random programs: modules of a few statements over earlier values, each statement tried in PyTorch when drawn.

The same seed draws the same program, in one version of PyTorch.
"""

from __future__ import annotations

import builtins
import random
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuzz.operators import OPERATORS

PRELUDE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def normal(seed, *shape):
    return torch.randn(shape, dtype=torch.float, generator=torch.Generator().manual_seed(seed))


def integers(seed, high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))
"""

CLASSES = {
    "Doubled": """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 4 * x * dy
""",
    "Residual": """
class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm(x)))))
""",
    "Gated": """
class Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        return self.down(F.silu(self.gate(y)) * self.up(y))
""",
    "SelfAttention": """
class SelfAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
""",
}

_STATIC_SIZES = (1, 1, 2, 2, 3, 3, 4, 5, 6, 8)
_BATCHES = ((3, 5), (2, 3), (5, 2), (4, 7), (3, 1), (1, 3), (2, 0), (0, 2))
_BATCH_WEIGHTS = (6, 6, 6, 6, 2, 2, 1, 1)
_MAX_VALUE = 1e4
_MAX_ELEMENTS = 600
_KINDS = {"f": lambda d: d.is_floating_point, "i": lambda d: d == torch.int64, "b": lambda d: d == torch.bool}


@dataclass(frozen=True)
class Tensor:
    """An input, parameter or buffer of a program.

    Attributes:
        name: as the program writes it.
        shapes: for each of the batches; a parameter or buffer has the same in all.
        fill: what it is filled with, as an expression of `seed` and `shape`.
        trained: whether it gets a gradient.
        dtype: the name of its dtype.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    fill: str = "normal(seed, *shape)"
    trained: bool = False
    dtype: str = "float32"

    @property
    def number(self) -> int:
        """The number in its name."""
        return int(re.sub(r"\D", "", self.name))

    def written(self, seed: int, shape: tuple[int, ...]) -> str:
        """The expression that makes it."""
        sizes = "".join(f", {s}" for s in shape)
        text = self.fill.replace(", *shape", sizes).replace("shape", str(shape)).replace("seed", str(seed))
        floating = "normal" in self.fill
        return f"{text}.to(torch.{self.dtype})" if floating and self.dtype != "float32" else text


@dataclass(frozen=True)
class Statement:
    """One or more lines of forward, and the names that they define."""

    text: str
    targets: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All variables and attributes of the module that it uses."""
        return frozenset(re.findall(r"self\.[pbm]\d+|\b[xv]\d+\b", self.text))


@dataclass(frozen=True)
class Program:
    """A random module and its inputs.

    Attributes:
        seed: what it was drawn from.
        inputs, parameters, buffers: the tensors that it starts from.
        modules: submodules, as (name, expression).
        statements: forward, in order.
        outputs: the names that forward returns.
        structure: "one", "tuple" or "dict".
        types: the shapes and dtype of every value, for those that shrink a program.
    """

    seed: int
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    statements: tuple[Statement, ...] = ()
    outputs: tuple[str, ...] = ()
    structure: str = "tuple"
    types: dict[str, tuple[tuple[tuple[int, ...], ...], torch.dtype]] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """The number of sets of sizes that it is called with."""
        return max((len(t.shapes) for t in self.inputs), default=1)

    def source(self, blocks: bool = False) -> str:
        """The module as Python text; with `blocks`, a list of two such modules."""
        body = "\n".join(line for s in self.statements for line in s.text.split("\n"))
        assignments = [
            *(f"self.{t.name[5:]} = nn.Parameter({t.written(t.number, t.shapes[0])})" for t in self.parameters),
            *(f"self.register_buffer({t.name[5:]!r}, {t.written(50 + t.number, t.shapes[0])})" for t in self.buffers),
            *(f"{name} = {text}" for name, text in self.modules),
        ]  # fmt: skip
        if "self.scale" in body:
            assignments.append("self.scale = 1.5")
        if "self.depth" in body:
            assignments.append("self.depth = 2")
        returned = ", ".join(self.outputs)
        if self.structure == "dict":
            returned = "{" + ", ".join(f'"{n.replace("self.", "")}": {n}' for n in self.outputs) + "}"
        elif self.structure == "tuple" or len(self.outputs) > 1:
            returned = f"({returned},)"
        arguments = "".join(f", {t.name}" for t in self.inputs)
        lines = ["class Program(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in assignments]
        lines += ["", f"    def forward(self{arguments}):"]
        lines += [f"        {line}" for line in body.split("\n") if line]
        lines += [f"        return {returned}"]
        used = [text for name, text in CLASSES.items() if re.search(rf"\b{name}\b", "\n".join(lines))]
        if blocks:
            lines[0] = "class Block(nn.Module):"
            lines.insert(3, "        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)")
            lines += ["", "", *_BLOCKS.strip().split("\n")]
        return "\n\n".join([PRELUDE.strip() + "\n", *(text.strip() + "\n" for text in used), "\n".join(lines) + "\n"])

    def call(self, step: int) -> list[torch.Tensor]:
        """The inputs of a step, in the dtypes of the program."""
        scope: dict[str, Any] = {"torch": torch}
        exec(PRELUDE, scope)
        inputs = []
        for tensor in self.inputs:
            shape = tensor.shapes[step % len(tensor.shapes)]
            value = eval(tensor.written(1000 + 10 * step + tensor.number, shape), scope)
            inputs.append(value.requires_grad_(tensor.trained))
        return inputs


_BLOCKS = """
class Program(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, *inputs):
        return [block(*inputs) for block in self.blocks]
"""


class Refused(Exception):  # noqa: N818  not an error: the next template is tried
    """A template does not apply to the sampled operands."""


@dataclass
class Operand:
    """A value as templates see it: its name is its text, its shape that of the first batch."""

    name: str
    tensors: list[torch.Tensor]

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensors[0].shape)

    @property
    def ndim(self) -> int:
        return self.tensors[0].ndim

    def is_static(self, axis: int) -> bool:
        return len({t.shape[axis] for t in self.tensors}) == 1


class Draw:
    """The namespace of placeholders: samples operands, numbers, parameters and submodules."""

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._rng = maker.rng

    def f(self, wanted: str) -> Operand:
        return self._maker.operand(wanted)

    def filled(self, x: Operand) -> Operand:
        """Return x if it is not empty in either call; else the template does not apply."""
        if not all(t.numel() for t in x.tensors):
            raise Refused
        return x

    def dim(self, x: Operand) -> int:
        if x.ndim == 0:
            raise Refused
        return self._rng.randrange(-x.ndim, x.ndim)

    def axis(self, x: Operand) -> int:
        return self._rng.randrange(-x.ndim - 1, x.ndim + 1)

    def dims(self, x: Operand) -> tuple[int, ...]:
        count = self._rng.randint(1, x.ndim) if x.ndim else 0
        return tuple(self._rng.sample(range(x.ndim), count))

    def permutation(self, x: Operand) -> str:
        return ", ".join(map(str, self._rng.sample(range(x.ndim), x.ndim))) or "()"

    def num(self, low: float, high: float) -> float:
        return round(self._rng.uniform(low, high), 2)

    def int(self, low: int, high: int) -> int:
        return self._rng.randint(low, high)

    def flag(self) -> bool:
        return self._rng.random() < 0.5

    def pick(self, *choices: Any, quoted: bool = False) -> str:
        choice = self._rng.choice(choices)
        return f'"{choice}"' if quoted else str(choice)

    def size(self, x: Operand, axis: int) -> str:
        if x.ndim == 0 or not -x.ndim <= axis < x.ndim:
            raise Refused
        if x.is_static(axis) and self._rng.random() < 0.6:
            return str(x.shape[axis])
        return f"{x}.size({axis})" if self._rng.random() < 0.7 else f"{x}.shape[{axis}]"

    def factored(self, x: Operand) -> str:
        """Return other sizes for the elements of x."""
        if any(not x.is_static(d) for d in range(x.ndim)):
            return f"-1, {self._rng.choice([1, 2])}"
        rest, sizes = x.tensors[0].numel(), []
        for factor in (2, 3, 2, 5):
            if rest and rest % factor == 0 and self._rng.random() < 0.6:
                sizes.append(factor)
                rest //= factor
        sizes.insert(self._rng.randint(0, len(sizes)), rest)
        return ", ".join(map(str, sizes))

    def param(self, *shape: builtins.int) -> Operand:
        return self._maker.parameter(shape)

    def buffer(self, *shape: builtins.int, positive: bool = False) -> Operand:
        return self._maker.buffer(shape, "normal(seed, *shape)" + (".abs() + 0.5" if positive else ""))

    def counter(self) -> Operand:
        return self._maker.buffer((), "torch.tensor(2)")

    def indices(self, x: Operand, axis: builtins.int | None, exact: bool = False) -> str:
        """A vector of indices along an axis of x; with `exact`, as many as the axis has."""
        if axis is not None and (x.ndim == 0 or not -x.ndim <= axis < x.ndim):
            raise Refused
        sizes = [t.numel() if axis is None else t.shape[axis] for t in x.tensors]
        if min(sizes) == 0:
            raise Refused
        if exact and len(set(sizes)) > 1:
            return f"torch.arange({x}.size({axis})) % 2"
        count = sizes[0] if exact else self._rng.randint(1, 4)
        return str(self._maker.buffer((count,), f"integers(seed, {min(sizes)}, *shape)"))

    def index(self, x: Operand, axis: builtins.int) -> str:
        """A tensor of indices along an axis of x, with x's shape."""
        if not all(x.is_static(d) for d in range(x.ndim)):
            return f"{x}.argsort({axis})"
        if x.shape[axis] == 0:
            raise Refused
        return str(self._maker.buffer(x.shape, f"integers(seed, {x.shape[axis]}, *shape)"))

    def labels(self, x: Operand, classes: builtins.int | None = None) -> str:
        classes = classes or x.shape[1]
        if not classes:
            raise Refused
        if not x.is_static(0):
            return f"torch.arange({x}.size(0)) % {classes}"
        return str(self._maker.buffer((x.shape[0],), f"integers(seed, {classes}, *shape)"))

    def module(self, kind: str, *arguments: Any, operand: Operand | None = None, **options: Any) -> str:
        """A new submodule; None among the arguments is the last size of `operand`, or its second for batch norms."""
        if operand is not None and (operand.ndim == 0 or not operand.is_static(-1)):
            raise Refused
        words = [repr(operand.shape[-1] if a is None and operand is not None else a) for a in arguments]
        words += [f"{k}={v!r}" for k, v in options.items()]
        return self._maker.module(f"{kind}({', '.join(words)})")


class Maker:
    """Makes one program, by the choices of `rng`."""

    def __init__(self, seed: int, rng: random.Random) -> None:
        self.rng = rng
        self.program = Program(seed, ())
        self.rows = 1 if self.rng.random() < 0.5 else 2
        batch = self.rng.choices(_BATCHES, _BATCH_WEIGHTS)[0]
        self.sizes: list[tuple[int, ...]] = [
            batch[: self.rows],
            *((self.rng.choice(_STATIC_SIZES),) * self.rows for _ in range(3)),
        ]
        if self.rng.random() < 0.04:
            self.sizes[-1] = (0,) * self.rows
        self.scopes: list[dict[str, Any]] = [{} for _ in range(self.rows)]
        self.itself = torch.nn.Module()
        self.itself.scale, self.itself.depth = 1.5, 2  # type: ignore[assignment]
        for scope in self.scopes:
            exec(PRELUDE + "".join(CLASSES.values()), scope)
            scope["self"] = self.itself
        self.values: dict[str, Operand] = {}
        self._pending: list[tuple[str, Any]] = []
        self._inputs()

    def make(self) -> Program:
        """Make the program; it has no outputs if none could be sampled."""
        wanted, tries = self.rng.randint(2, 12), 0
        groups = list(OPERATORS)
        weights = [OPERATORS[g][0] for g in groups]
        # A program likes some operators: their combinations meet more often.
        liked = [self.rng.choices(groups, weights)[0] for _ in range(3)]
        while len(self.program.statements) < wanted and tries < 8 * wanted:
            tries += 1
            group = self.rng.choice(liked) if self.rng.random() < 0.3 else self.rng.choices(groups, weights)[0]
            self._try(self.rng.choice(OPERATORS[group][1]))
        return self._finished()

    # Operands of statements

    def operand(self, wanted: str) -> Operand:
        """An earlier value of one of the kinds and ranks, mostly a recent one."""
        kinds, _, ranks = wanted.partition("@")
        rank, more = int(ranks.rstrip("+") or 0), ranks.endswith("+") or not ranks
        candidates = [
            v
            for v in self.values.values()
            if any(_KINDS[k](v.tensors[0].dtype) for k in kinds) and (v.ndim == rank or (more and v.ndim > rank))
        ]
        if not candidates:
            raise Refused
        return self.rng.choices(candidates, [1.0 + 2.0 * (i / len(candidates)) for i in range(len(candidates))])[0]

    def broadcasting(self, x: Operand) -> Operand:
        """A value of x's dtype that broadcasts with x."""
        candidates = [v for v in self.values.values() if v.tensors[0].dtype == x.tensors[0].dtype and _broadcast(v, x)]
        if x.tensors[0].is_floating_point() and (not candidates or self.rng.random() < 0.3):
            axes = self.rng.randint(0, x.ndim)
            sizes = [x.shape[d] if x.is_static(d) and self.rng.random() < 0.7 else 1 for d in range(x.ndim)]
            return self.parameter(tuple(sizes[axes:]))
        if not candidates:
            raise Refused
        return self.rng.choice(candidates)

    def alike(self, x: Operand) -> Operand:
        """A value of x's shape and dtype."""
        kind, shapes = x.tensors[0].dtype, [t.shape for t in x.tensors]
        candidates = [
            v for v in self.values.values() if v.tensors[0].dtype == kind and [t.shape for t in v.tensors] == shapes
        ]
        return self.rng.choice(candidates)

    def parameter(self, shape: Sequence[int]) -> Operand:
        """A new parameter, or rarely an existing one."""
        shape = tuple(shape)
        there = [t for t in self.program.parameters if t.shapes[0] == shape]
        if there and self.rng.random() < 0.3:
            return self.values[self.rng.choice(there).name]
        scale = self.rng.choice(["", " * 0.5", " * 0.5"])
        return self._start("parameters", "p", Tensor("", (shape,), f"normal(seed, *shape){scale}", trained=True))

    def buffer(self, shape: Sequence[int], fill: str) -> Operand:
        return self._start("buffers", "b", Tensor("", (tuple(shape),), fill))

    def module(self, text: str) -> str:
        """A new submodule."""
        name = f"self.m{len(self.program.modules)}"
        self.program = replace(self.program, modules=(*self.program.modules, (name, text)))
        torch.manual_seed(len(self.program.modules))
        try:
            submodule = eval(text, self.scopes[0])
        except ValueError as error:  # a recurrent layer of width 0
            raise Refused from error
        setattr(self.itself, name[5:], submodule)
        return name

    def _start(self, kind: str, letter: str, tensor: Tensor) -> Operand:
        there: tuple[Tensor, ...] = getattr(self.program, kind)
        if any(s > 64 for s in tensor.shapes[0]):
            raise Refused
        tensor = replace(tensor, name=f"self.{letter}{len(there)}")
        self.program = replace(self.program, **{kind: (*there, tensor)})
        value = eval(tensor.written(tensor.number + 50 * (kind == "buffers"), tensor.shapes[0]), self.scopes[0])
        if tensor.trained:
            value = torch.nn.Parameter(value)
            setattr(self.itself, tensor.name[5:], value)
        else:
            self.itself.register_buffer(tensor.name[5:], value)
        self.values[tensor.name] = Operand(tensor.name, [value] * self.rows)
        return self.values[tensor.name]

    def _inputs(self) -> None:
        kinds = ["f", *self.rng.choices("ffib", k=self.rng.randint(0, 2))]
        wide = self.rng.choices(["float32", "float64", "bfloat16"], [10, 1, 1])[0]
        for number, kind in enumerate(kinds):
            rank = self.rng.choices([0, 1, 2, 3, 4], [1, 3, 6, 4, 2])[0]
            dims = [self.sizes[0], *self.rng.choices(self.sizes[1:], k=3)][:rank]
            if self.rng.random() < 0.1:
                self.rng.shuffle(dims)
            shapes = tuple(tuple(d[row] for d in dims) for row in range(self.rows))
            fill = {"f": "normal(seed, *shape)", "i": "integers(seed, 8, *shape)", "b": "normal(seed, *shape) > 0"}[
                kind
            ]
            is_float = kind == "f"
            dtype = wide if is_float else "float32"
            tensor = Tensor(f"x{number}", shapes, fill, is_float and self.rng.random() < 0.5, dtype)
            self.program = replace(self.program, inputs=(*self.program.inputs, tensor))
        batches = [self.program.call(step) for step in range(self.rows)]
        for number, tensor in enumerate(self.program.inputs):
            self.values[tensor.name] = Operand(tensor.name, [row[number] for row in batches])
            for scope, row in zip(self.scopes, batches, strict=True):
                scope[tensor.name] = row[number]

    # Statements

    def _try(self, template: str) -> None:
        before = self.program, dict(self.values)
        try:
            statement, results = self._drawn(template)
        except (Refused, KeyError, IndexError):
            self.program, self.values = before
            return
        self.program = replace(self.program, statements=(*self.program.statements, statement))
        for name, tensors in results.items():
            self.values[name] = Operand(name, tensors)

    def _drawn(self, template: str) -> tuple[Statement, dict[str, list[torch.Tensor]]]:
        target = f"v{sum(len(s.targets) for s in self.program.statements)}"
        changes = template.startswith("!")
        text = self._filled(template.lstrip("!"), target)
        if "{_}" in template:
            text = _as_lines(text)
        elif not changes:
            text = f"{target} = {text}"
        results = self._run(text, None if changes else target)
        if changes:
            self._check(*({n: s.get(n) for n in re.findall(r"\b[xv]\d+\b", text)} for s in self.scopes))
            return Statement(text), {}
        return self._named(text, target, results)

    def _named(self, text: str, target: str, values: list[Any]) -> tuple[Statement, dict[str, list[torch.Tensor]]]:
        """The statement with a name for each of its results."""
        if isinstance(values[0], (tuple, list)):
            counts = {len(f) for f in values}
            first = text.partition(" = ")[2]
            if len(counts) > 1 or not values[0] or "\n" in text:
                raise Refused
            if len(values[0]) > 3 or self.rng.random() < 0.2:
                index = self.rng.randrange(len(values[0]))
                return self._named(f"{target} = ({first})[{index}]", target, [f[index] for f in values])
            start = int(target[1:])
            names = tuple(f"v{start + i}" for i in range(len(values[0])))
            text = f"{', '.join(names)}{',' if len(names) == 1 else ''} = {first}"
            results = {name: [f[i] for f in values] for i, name in enumerate(names)}
        else:
            names, results = (target,), {target: values}
        for tensors in results.values():
            if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided for t in tensors):
                raise Refused
        self._check(*({n: r[row] for n, r in results.items()} for row in range(self.rows)))
        for row, scope in enumerate(self.scopes):
            scope.update({n: r[row] for n, r in results.items()})
        return Statement(text, names), results

    def _check(self, *rows: dict[str, Any]) -> None:
        """Reject a statement with too many results, or with results too large to be compared."""
        for tensor in (t for row in rows for t in row.values() if isinstance(t, torch.Tensor)):
            if tensor.numel() > _MAX_ELEMENTS or tensor.ndim > 5 or tensor.dtype == torch.complex128:
                raise Refused
            if tensor.is_floating_point() and tensor.numel():
                largest = tensor.detach().abs().max().item()
                if not largest <= _MAX_VALUE and self.rng.random() < 0.98:
                    raise Refused

    def _run(self, text: str, target: str | None) -> list[Any]:
        """The results for each batch. If the text mutates a tensor and then fails, the tensor is dropped too."""
        results = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for scope in self.scopes:
                torch.manual_seed(1)
                try:
                    exec(text, scope)
                except Exception as error:
                    raise Refused from error
                if target is not None:
                    results.append(scope[target])
        return results

    def _filled(self, template: str, target: str) -> str:
        scope: dict[str, Any] = {}
        namespace = _Namespace(Draw(self))

        def fill(match: re.Match[str]) -> str:
            content = match[1]
            if content == "_":
                return target
            if drawn := re.fullmatch(r"(\w+):([fib@\d+]+)", content):
                scope[drawn[1]] = self.operand(drawn[2])
                return str(scope[drawn[1]])
            if drawn := re.fullmatch(r"(\w+)([~^])(\w+)", content):
                scope[drawn[1]] = (self.broadcasting if drawn[2] == "~" else self.alike)(scope[drawn[3]])
                return str(scope[drawn[1]])
            name, text = "", content
            if named := re.fullmatch(r"(\w+)=([^=].*)", content):
                name, text = named[1], named[2]
            value = eval(text, namespace, scope)
            if name:
                scope[name] = value
            return str(value)

        return re.sub(r"\{([^{}]*)\}", fill, template)

    def _finished(self) -> Program:
        statements = self.program.statements
        read: set[str] = set().union(*(s.names - set(s.targets) for s in statements))
        names = [n for s in statements for n in s.targets if not self.values[n].tensors[0].is_complex()]
        floats = [n for n in names if self.values[n].tensors[0].is_floating_point()]
        ends = [n for n in names if n not in read]
        outputs = self.rng.sample(ends, min(len(ends), self.rng.randint(1, 4)))
        if floats and self.rng.random() < 0.3:
            outputs.append(self.rng.choice(floats))
        if self.rng.random() < 0.05:
            outputs.append(self.rng.choice([t.name for t in (*self.program.inputs, *self.program.buffers)]))
        structure = self.rng.choices(["one", "tuple", "dict"], [3, 3, 1])[0]
        types = {n: (tuple(tuple(t.shape) for t in v.tensors), v.tensors[0].dtype) for n, v in self.values.items()}
        return cleaned(replace(self.program, outputs=tuple(dict.fromkeys(outputs)), structure=structure, types=types))


class _Namespace(dict[str, Any]):
    """The methods of `Draw` as global names of placeholders."""

    def __init__(self, draw: Draw) -> None:
        super().__init__({name: getattr(draw, name) for name in dir(draw) if not name.startswith("_")})


def _broadcast(a: Operand, b: Operand) -> bool:
    try:
        return all(
            torch.broadcast_shapes(p.shape, q.shape) == q.shape for p, q in zip(a.tensors, b.tensors, strict=True)
        )
    except RuntimeError:
        return False


def _as_lines(text: str) -> str:
    """The statements of a template on separate lines; those after `for …:` or `with …:` are indented."""
    return text.replace("; ", "\n")


def cleaned(program: Program) -> Program:
    """The program without parameters, buffers and submodules that nothing reads."""
    names = set(program.outputs).union(*(s.names for s in program.statements))

    return replace(
        program,
        parameters=tuple(t for t in program.parameters if t.name in names),
        buffers=tuple(t for t in program.buffers if t.name in names),
        modules=tuple(m for m in program.modules if m[0] in names),
    )


def draw(seed: int) -> Program:
    """The program of a seed."""
    return Maker(seed, random.Random(seed)).make()
