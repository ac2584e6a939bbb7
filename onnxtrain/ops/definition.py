"""The definition of an op: everything that is known about it, in one place.

Passes, the differentiator and the executor ask a definition; none of them holds a list of op names. All fields are
required, so that a hole is an error where the op is written and not where it is used; `constructors.py` fills them for
whole classes of ops.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import axes as axis_maps
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType, rank_of, type_of
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.system.machine import Machine

OPSET = 23  # ai.onnx inside the pipeline; written files may ask for another


class Effects(enum.Flag):
    """What a node does besides computing its outputs from its inputs."""

    NONE = 0
    RANDOM = enum.auto()  # draws from a generator: never merged, reordered or dropped under rng="torch"
    PYTHON = enum.auto()  # runs the user's Python: it may keep its inputs, and give them out again
    COLLECTIVE = enum.auto()  # all ranks must run it
    HOST_SYNC = enum.auto()  # its output's sizes depend on data: a GPU must be waited for


class Required(enum.Enum):
    """Marks an attribute that has no default."""

    REQUIRED = enum.auto()


REQUIRED = Required.REQUIRED


class Standard(enum.Enum):
    """Marks a body that needs no writing: the op is ONNX itself."""

    STANDARD = enum.auto()


STANDARD = Standard.STANDARD


@dataclass(frozen=True)
class NoBody:
    """Why an op cannot be written in standard ops."""

    reason: str


class NotDifferentiable(enum.Enum):
    """Marks an op through which no gradient flows."""

    NOT_DIFFERENTIABLE = enum.auto()


NOT_DIFFERENTIABLE = NotDifferentiable.NOT_DIFFERENTIABLE


class ByBody(enum.Enum):
    """Marks an op that is differentiated through its body."""

    BY_BODY = enum.auto()


BY_BODY = ByBody.BY_BODY


class Call:
    """A call of a torch function: evaluated at once in tests, printed as a line of source in a program."""

    __slots__ = ("args", "function", "kwargs")

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def evaluate(self) -> Any:
        return self.function(*map(_value, self.args), **{k: _value(v) for k, v in self.kwargs.items()})


class Overwriting(Call):
    """A call of a function that another one stands beside, which writes the result over its first argument."""

    __slots__ = ("over",)

    def __init__(self, function: Callable[..., Any], over: Callable[..., Any], *args: Any) -> None:
        super().__init__(function, *args)
        self.over = over


class Infix(Call):
    """A binary Python operator, printed as `a + b`."""

    __slots__ = ("symbol",)

    def __init__(self, symbol: str, function: Callable[[Any, Any], Any], left: Any, right: Any) -> None:
        super().__init__(function, left, right)
        self.symbol = symbol


class Method(Call):
    """A call of a tensor method, printed as `x.view(...)`."""

    __slots__ = ("name",)

    def __init__(self, name: str, receiver: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(lambda x, *a, **k: getattr(x, name)(*a, **k), receiver, *args, **kwargs)
        self.name = name


class Property(Method):
    """A property of a tensor, printed as `x.mT`."""

    __slots__ = ()

    def __init__(self, name: str, receiver: Any) -> None:
        super().__init__(name, receiver)
        self.function = lambda x: getattr(x, name)


class Device(enum.Enum):
    """Stands for the device that the program runs on, in the arguments of a Call."""

    DEVICE = enum.auto()


DEVICE = Device.DEVICE


def _value(argument: Any) -> Any:
    if isinstance(argument, Call):
        return argument.evaluate()
    if argument is DEVICE:
        return torch.device("cpu")
    return argument


class Place(NamedTuple):
    """Where a named input or output stands."""

    at: int
    is_output: bool
    is_variadic: bool


class NodeView:
    """A node read through its definition: inputs, outputs and attributes by name.

    An absent optional input or unused output is None; a variadic input or output is a tuple; an absent attribute has
    its default.
    """

    def __init__(self, node: ir.Node, definition: OpDef, wanted: frozenset[str] | None = None) -> None:
        self.node = node
        self.definition = definition
        self._wanted = wanted

    def __getattr__(self, name: str) -> Any:
        definition = self.definition
        if name in definition.attributes:
            attribute = self.node.attributes.get(name)
            if attribute is None:
                default = definition.attributes[name]
                if default is REQUIRED:
                    raise GraphError(f"{definition.name} needs the attribute {name}")
                return default
            return _attribute_value(attribute)
        place = definition.places.get(name)
        if place is None:
            raise AttributeError(f"{definition.name} has no input, output or attribute {name}")
        values = self.node.outputs if place.is_output else self.node.inputs
        if place.is_variadic:
            return tuple(values[place.at :])
        return values[place.at] if place.at < len(values) else None

    def wants(self, name: str) -> bool:
        """In a gradient rule: whether the gradient of this input is asked for; `xs[2]` is a variadic input's third."""
        return self._wanted is None or name in self._wanted


def _attribute_value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.STRING:
        return attribute.as_string()
    if attribute.type == ir.AttributeType.FLOAT:
        return float(attribute.value)
    value = attribute.value
    return tuple(value) if isinstance(value, list) else value


# A gradient rule: (builder, node, one cotangent per output, None where there is none) -> one gradient per input.
GradientRule = Callable[..., "Sequence[ir.Value | None] | ir.Value | None"]
# A body: (builder, node) -> the node's outputs, from n's inputs and attributes, in ops that have a lower body.
Body = Callable[[Builder, NodeView], "ir.Value | Sequence[ir.Value | None]"]
FromTorch = Callable[..., Any]


@dataclass(frozen=True)
class Gradient:
    """One way to differentiate an op.

    Attributes:
        build: the rule. Cotangents come in the outputs' order, the result in the inputs' order; a single-input op may
            return a bare value. Rules never un-broadcast: the differentiator does.
        reads: names of the inputs and outputs whose elements the rule reads: what must be kept for backward.
    """

    build: GradientRule
    reads: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to run an op in torch.

    Attributes:
        lower: from the node and the arguments, one per input, the call. In a program arguments are names of local
            variables, in tests tensors; lower must not look into them.
        scalars: whether a 0-dimensional constant may come as a Python number.
        host: indices of inputs that come as Python ints (0-dimensional) or tuples of ints.
        waits: whether the call moves elements from or to the host, beside those of `host`: a GPU is waited for.
        host_if_known: from the node, the indices of inputs that come so where the host knows them, else as tensors.
        applies: whether this kernel can run the node (dtypes, attributes, device type).
        deterministic: whether two runs give the same bits.
        workspace: bytes of scratch memory beside inputs and outputs.
        output_bytes: what those outputs take that this kernel gives in another form than the op's types say, by name.
            It may wait until a compiled kernel is there: only then it is known which form.
        in_place: index of the input whose memory it can reuse for its first output, or None.
        name: of the library or the way, where any of several kernels may run the node and speed decides; such kernels
            take tensors only.
        seconds: what it is expected to take, from the node, the shapes of its inputs and the machine, where it has a
            name; infinite where it should not even be tried.
        is_there: whether it can run by now; None where it never will, as without a compiler. Until then its call does
            the same in another way, which says nothing about its speed.
        prepare: begins what brings it there.
    """

    lower: Callable[..., Call]
    scalars: bool = False
    host: frozenset[int] = frozenset()
    waits: Callable[[NodeView], bool] = lambda node: False
    host_if_known: Callable[[NodeView], Collection[int]] = lambda node: ()
    applies: Callable[[NodeView, str], bool] = lambda node, device: True
    deterministic: bool = True
    workspace: Callable[[NodeView], Size] = lambda node: 0
    output_bytes: Callable[[NodeView], Mapping[str, Size]] = lambda node: {}
    in_place: int | None = None
    name: str = ""
    seconds: Callable[[NodeView, Shapes, Machine], float] = lambda node, shapes, machine: 0.0
    is_there: Callable[[], bool | None] = lambda: True
    prepare: Callable[[], None] = lambda: None


class Replay(NamedTuple):
    """How backward computes a random op again, exactly as it was.

    Attributes:
        reads: the names of those outputs that are kept for it: what was drawn.
        build: (op, node, *these outputs) -> the first output, from them and the node's inputs, bit for bit.
    """

    reads: tuple[str, ...]
    build: Callable[..., ir.Value]


class Layout(NamedTuple):
    """That some inputs and outputs hold pictures [n, c, h, w] in one order of memory, whichever that is.

    Attributes:
        values: the names of these inputs and outputs.
        gains: whether the op runs faster where that order is channels-last.
    """

    values: frozenset[str]
    gains: bool = False


class Fuses(NamedTuple):
    """That an op is no more than loops over elements, or over rows: a compiler may join them with its neighbours'.

    Attributes:
        gains: whether kernels of regions that hold it and a neighbour were measured to be faster than its own.
    """

    gains: bool = False


class Factor(NamedTuple):
    """That numbers which multiply what an op reads or gives may stand elsewhere, or become part of the op.

    Attributes:
        inputs: the names of inputs that may be multiplied by the number.
        of_output: whether that multiplies the first output by it as well, and the other way round.
        scaled: (op, node, number) -> the outputs of the op that multiplies by it itself, at no cost; None where this
            number is not exact there. Where there is no such op, None: the number may only pass from one to the other.
    """

    inputs: frozenset[str]
    of_output: bool
    scaled: Callable[[Builder, NodeView, float], Sequence[ir.Value] | None] | None


@dataclass(frozen=True, kw_only=True)
class OpDef:
    """All facts about one op. See the module docstring; `docs/development/adding-an-op.md` walks through one.

    Attributes:
        domain, name: identify the op in the graph.
        inputs, outputs: names; `x?` is optional, `xs...` variadic (last).
        attributes: name to default, or REQUIRED.
        since: the first ai.onnx opset whose meaning this definition has (1 for other domains).
        from_torch: ATen overload ("aten.relu.default") to a function (op, *args, **kwargs) that builds nodes; tensors
            come as values, sizes as ints or expressions, `op.out` holds PyTorch's output types.
        shapes: from the node, the types of its outputs.
        body: its meaning in standard ops: STANDARD, a builder, or NoBody(reason).
        native_ok: from the node, whether stock onnxruntime's own kernel of this name computes the same.
        gradient: one or more ways to differentiate, the first is the default; or BY_BODY: where a gradient flows
            through the node, its body takes its place; or NOT_DIFFERENTIABLE.
        stops: inputs that are never differentiated (indices, shapes, masks).
        detached: floating outputs that PyTorch gives no gradient (running statistics, log-sum-exp kept for backward).
        kernels: candidates, best first.
        axes: from the node, its axis map in the notation of `graph.axes`, or NO_AXES.
        effects: see Effects.
        aliases: output index to index of the input that it may be a view of.
        flops: from the node, floating-point operations.
        outputs_of: (inputs, attributes) -> number of outputs, where it varies.
        host: (node view, *inputs) -> outputs on Python ints and tuples of ints, for size arithmetic; None: it cannot.
        shape_only: inputs of which only the sizes are read: `host` gets an object with `size(axis)` for them.
        objects: outputs that are Python objects in a running program, and no tensors.
        replay: see Replay; None for an op that draws nothing, or whose outputs must be kept.
        repeats: whether a node gives the same again and does nothing else, although the op has effects.
        layout: see Layout; None where the kernels read their inputs in any order and write in PyTorch's usual one.
        fuses: see Fuses; None where a library's kernel computes it, or where it moves elements.
        commutative: whether its two inputs may stand in either order.
        sized: inputs whose sizes decide how the body is written. A function holds the body for these numbers alone.
        same_elements: whether its output has the elements of its first input in their order, in another shape or
            element type perhaps.
        moves: inputs whose elements its outputs hold as they are, each at most once.
        adds: the name of an optional input of the first output's type, which is added to that output and no other; "":
            there is none.
        adds_first: the name of an optional input of the first input's type, which is added to that input before all
            else; "": there is none.
        activates: the ops that it may apply to its first output, behind what it `adds`: its attribute `activation`
            names one of them, or is "".
        factor: from the node, see Factor; None where a number that multiplies has to stay where it is.
        cpp: of an elementwise op, its C++ on elements `{0}`, `{1}`, through which NaN goes as in PyTorch; "": none.
            Small programs that become one compiled call are made of them.
    """

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    since: int
    from_torch: Mapping[str, FromTorch]
    shapes: Callable[[NodeView], Sequence[TensorType]]
    body: Body | Literal[Standard.STANDARD] | NoBody
    native_ok: Callable[[NodeView], bool]
    gradient: tuple[Gradient, ...] | Literal[ByBody.BY_BODY, NotDifferentiable.NOT_DIFFERENTIABLE]
    stops: frozenset[str]
    kernels: tuple[Kernel, ...]
    axes: Callable[[NodeView], str]
    effects: Effects
    aliases: Mapping[int, int]
    flops: Callable[[NodeView], Size]
    host: Callable[..., Any] | None
    outputs_of: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = field(default=None)
    shape_only: frozenset[str] = frozenset()
    detached: frozenset[str] = frozenset()
    objects: frozenset[str] = frozenset()
    replay: Replay | None = None
    repeats: Callable[[ir.Node], bool] = lambda node: False
    layout: Layout | None = None
    fuses: Fuses | None = None
    commutative: bool = False
    sized: frozenset[str] = frozenset()
    same_elements: bool = False
    moves: frozenset[str] = frozenset()
    adds: str = ""
    adds_first: str = ""
    activates: frozenset[str] = frozenset()
    factor: Callable[[NodeView], Factor | None] | None = None
    cpp: str = ""

    def __post_init__(self) -> None:
        names = [n.rstrip("?").removesuffix("...") for n in (*self.inputs, *self.outputs)] + list(self.attributes)
        twice = {n for n in names if names.count(n) > 1}
        if twice:
            raise GraphError(f"{self.name}: {', '.join(sorted(twice))} names two things")

    def view(self, node: ir.Node, wanted: Iterable[str] | None = None) -> NodeView:
        return NodeView(node, self, None if wanted is None else frozenset(wanted))

    def output_types(self, node: ir.Node) -> Sequence[TensorType]:
        types = self.shapes(self.view(node))
        added = getattr(self.view(node), self.adds) if self.adds else None
        if added is not None and type_of(added) != types[0]:
            raise GraphError(
                f"{self.name} adds a tensor of its result's type",
                expected=str(types[0]),
                got=str(type_of(added)),
                todo=f"cast or expand what is given as {self.adds}, or add it by an Add behind",
            )
        return types

    def output_count(self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
        return self.outputs_of(inputs, attributes) if self.outputs_of else len(self.outputs)

    @functools.cached_property
    def places(self) -> Mapping[str, Place]:
        """The inputs and outputs by name, without their marks."""
        return {
            name.rstrip("?").removesuffix("..."): Place(index, is_output, name.endswith("..."))
            for is_output, names in ((True, self.outputs), (False, self.inputs))
            for index, name in enumerate(names)
        }

    @functools.cached_property
    def required(self) -> frozenset[str]:
        """The attributes that have no default."""
        return frozenset(name for name, default in self.attributes.items() if default is REQUIRED)

    def input_name(self, index: int) -> str:
        """The declared name of input `index`, without its mark; a variadic's name for each of its members."""
        declared = self.inputs[min(index, len(self.inputs) - 1)]
        return declared.rstrip("?").removesuffix("...")

    def output_name(self, index: int) -> str:
        """The declared name of output `index`, without its mark."""
        declared = self.outputs[min(index, len(self.outputs) - 1)]
        return declared.rstrip("?").removesuffix("...")

    def axis_map(self, node: ir.Node) -> axis_maps.AxisMap | None:
        return axis_maps.parse(self.axes(self.view(node)))

    def kernel(self, node: ir.Node, device: str) -> Kernel:
        """The first kernel that applies to the node on this device type ("cpu", "cuda")."""
        view = self.view(node)
        for kernel in self.kernels:
            if kernel.applies(view, device):
                return kernel
        raise GraphError(f"no kernel of {self.name} applies on {device} to {node.name}")

    def candidates(self, node: ir.Node, device: str) -> tuple[Kernel, ...]:
        """The kernels between which speed decides, PyTorch's own way first; one where there is no choice."""
        first = self.kernel(node, device)
        view = self.view(node)
        others = (k for k in self.kernels if k is not first and k.name and k.applies(view, device))
        return (first, *others) if first.name else (first,)


def numel(value: ir.Value | None) -> Size:
    """The number of elements of a value, as a size."""
    return 0 if value is None else sizes.multiply(1, *sizes.dims_of(value))


def ranks(values: Sequence[ir.Value | None]) -> list[int | None]:
    return [None if v is None else rank_of(v) for v in values]
