"""The definition of an op: its meaning, in one place.

Passes, the differentiator and the executor read definitions; none of them holds a list of op names. Facts that only one
of them needs are registered beside the definition (`interfaces/`). The basic fields are required: a missing one is an
error where the op is defined, not where it is used. `constructors.py` fills them for whole classes of ops.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import onnx_ir as ir
import torch

from onnxtrain.errors import GraphError
from onnxtrain.graph import axes as axis_maps
from onnxtrain.graph import sizes
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.sizes import Size
from onnxtrain.graph.values import TensorType
from onnxtrain.native import Library
from onnxtrain.ops.cost_model import Shapes
from onnxtrain.system.machine import Machine

OPSET = 23  # ai.onnx inside the pipeline; written files may ask for another


class Effects(enum.Flag):
    """The side effects of a node."""

    NONE = 0
    RANDOM = enum.auto()  # samples from a generator: never merged, reordered or dropped under rng="torch"
    PYTHON = enum.auto()  # runs the user's Python: it may keep its inputs, and return them later
    COLLECTIVE = enum.auto()  # communicates with other processes: never merged, reordered or repeated
    HOST_SYNC = enum.auto()  # its output's sizes depend on data: the host must wait for the GPU


class Required(enum.Enum):
    """Marks an attribute that has no default."""

    REQUIRED = enum.auto()


REQUIRED = Required.REQUIRED


class Standard(enum.Enum):
    """Marks a body that need not be written: the op is a standard one."""

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


class Zeros(enum.Enum):
    """A gradient of zeros, for which no value is computed where another gradient is added to it."""

    ZEROS = enum.auto()


ZEROS = Zeros.ZEROS


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


class InPlaceCapableCall(Call):
    """A call of a function that has an in-place variant, which writes the result over its first argument."""

    __slots__ = ("in_place",)

    def __init__(self, function: Callable[..., Any], in_place: Callable[..., Any], *args: Any) -> None:
        super().__init__(function, *args)
        self.in_place = in_place


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
    """Represents the device that the program runs on, in the arguments of a Call."""

    DEVICE = enum.auto()


DEVICE = Device.DEVICE


def _value(argument: Any) -> Any:
    if isinstance(argument, Call):
        return argument.evaluate()
    if argument is DEVICE:
        return torch.device("cpu")
    return argument


class Slot(NamedTuple):
    """The position of a named input or output."""

    position: int
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
            attribute = self.node.attributes.data.get(name)  # 0.2 us if absent; UserDict.get: 2.7
            if attribute is None:
                default = definition.attributes[name]
                if default is REQUIRED:
                    raise GraphError(
                        f"{definition.name}: the required attribute {name} is missing", where=self.node.name
                    )
                return default
            return _attribute_value(attribute)
        slot = definition.slots.get(name)
        if slot is None:
            raise AttributeError(f"{definition.name} has no input, output or attribute {name}")
        values = self.node.outputs if slot.is_output else self.node.inputs
        if slot.is_variadic:
            return tuple(values[slot.position :])
        return values[slot.position] if slot.position < len(values) else None

    def wants(self, name: str) -> bool:
        """Return, in a gradient rule, whether this input needs a gradient; `xs[2]` is the third of a variadic input."""
        return self._wanted is None or name in self._wanted


def _attribute_value(attribute: ir.Attr) -> Any:
    if attribute.type == ir.AttributeType.STRING:
        return attribute.as_string()
    if attribute.type == ir.AttributeType.FLOAT:
        return float(attribute.value)
    value = attribute.value
    return tuple(value) if isinstance(value, list) else value


# A gradient rule: (builder, node, one cotangent or None per output) -> one gradient or None per input.
GradientRule = Callable[..., "Sequence[ir.Value | Zeros | None] | ir.Value | Zeros | None"]
# A body: (builder, node) -> the node's outputs, computed from its inputs and attributes by simpler ops.
Body = Callable[[Builder, NodeView], "ir.Value | Sequence[ir.Value | None]"]
FromTorch = Callable[..., Any]


@dataclass(frozen=True)
class Gradient:
    """One way to differentiate an op.

    Attributes:
        build: the rule. It takes cotangents in the order of the outputs and returns gradients in the order of the
            inputs; for an op with one input it may return the value itself. None: the input has no gradient; ZEROS: it
            has one, of zeros. A rule never un-broadcasts: the differentiator does.
        reads: names of the inputs and outputs whose elements the rule reads; these are kept for backward.
    """

    build: GradientRule
    reads: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to run an op in torch.

    Attributes:
        lower: (node, *arguments), one argument per input -> the call. In a program the arguments are names of local
            variables, in tests they are tensors; `lower` must not inspect them.
        accepts_scalars: whether a 0-dimensional constant may be passed as a Python number.
        host_inputs: indices of the inputs passed as Python ints (0-dimensional) or tuples of ints (vectors).
        synchronizes: whether the call copies elements from or to the host, besides `host_inputs`: the host waits for
            the GPU.
        host_inputs_if_known: from the node, indices of the inputs passed as Python ints if the host knows their
            values, else as tensors.
        applies: (node, device type) -> whether this kernel can run the node.
        deterministic: whether two runs give the same bits. Another kernel runs the node under
            `torch.use_deterministic_algorithms` if one that applies does; if none does, the PyTorch function that this
            one calls decides, as in eager: it uses a deterministic algorithm, raises, or warns.
        workspace_bytes: scratch memory besides inputs and outputs.
        in_place_input: index of the input whose memory it can reuse for its first output, or None.
        name: of the library or method, if several kernels may run the node and the fastest is chosen; such kernels
            take tensors only, and their conditions and times depend on nothing but the node's attributes, the types of
            its inputs and outputs, and whether native kernels are on. Else "".
        seconds: for a kernel with a name, the expected time, from the node, the shapes of its inputs and the machine;
            infinite if it should not even be tried.
        library: for a kernel with a name, the compiled library that it calls, if any. Until that is loaded the call
            computes the same by other code, whose time says nothing about the kernel's.
    """

    lower: Callable[..., Call]
    accepts_scalars: bool = False
    host_inputs: frozenset[int] = frozenset()
    synchronizes: Callable[[NodeView], bool] = lambda node: False
    host_inputs_if_known: Callable[[NodeView], Collection[int]] = lambda node: ()
    applies: Callable[[NodeView, str], bool] = lambda node, device: True
    deterministic: bool = True
    workspace_bytes: Callable[[NodeView], Size] = lambda node: 0
    in_place_input: int | None = None
    name: str = ""
    seconds: Callable[[NodeView, Shapes, Machine], float] = lambda node, shapes, machine: 0.0
    library: Library | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class OpDef:
    """The meaning of one op. See the module docstring; `docs/development/adding-an-op.md` walks through one.

    Attributes:
        domain, name: identify the op in the graph.
        inputs, outputs: names; `x?` is optional, `xs...` variadic (last).
        attributes: name to default, or REQUIRED.
        from_torch: ATen overload ("aten.relu.default") to a function (op, *args, **kwargs) that builds nodes; tensors
            are passed as values, sizes as ints or expressions, and `op.out` holds PyTorch's output types.
        shapes: from the node, the types of its outputs.
        body: its meaning in standard ops: STANDARD, a builder, or NoBody(reason).
        gradient: one or more ways to differentiate, the first is the default; or BY_BODY: the node is replaced by its
            body if a gradient flows through it; or NOT_DIFFERENTIABLE.
        nondiff_inputs: inputs that are never differentiated (indices, shapes, masks).
        nondiff_outputs: floating-point outputs to which PyTorch gives no gradient (running statistics, the logsumexp
            kept for backward).
        kernels: candidates, best first.
        axes: from the node, its axis map in the notation of `graph.axes`, or NO_AXES.
        effects: see Effects.
        aliases: index of an output to the index of the input that it may be a view of.
        count_outputs: (inputs, attributes) -> number of outputs, if it varies.
        host_eval: (node view, *inputs) -> outputs, on Python ints and tuples of ints, for size arithmetic; None: the op
            cannot be evaluated on the host.
        shape_only_inputs: inputs of which only the sizes are read: for them `host_eval` takes an object with
            `size(axis)`.
        preserves_elements: whether its output has the elements of its first input in the same order; shape and element
            type may differ.
        moved_inputs: inputs whose elements its outputs hold unchanged, each at most once.
    """

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    from_torch: Mapping[str, FromTorch]
    shapes: Callable[[NodeView], Sequence[TensorType]]
    body: Body | Literal[Standard.STANDARD] | NoBody
    gradient: tuple[Gradient, ...] | Literal[ByBody.BY_BODY, NotDifferentiable.NOT_DIFFERENTIABLE]
    nondiff_inputs: frozenset[str]
    kernels: tuple[Kernel, ...]
    axes: Callable[[NodeView], str]
    effects: Effects
    aliases: Mapping[int, int]
    host_eval: Callable[..., Any] | None = None
    count_outputs: Callable[[Sequence[ir.Value | None], Mapping[str, Any]], int] | None = None
    shape_only_inputs: frozenset[str] = frozenset()
    nondiff_outputs: frozenset[str] = frozenset()
    preserves_elements: bool = False
    moved_inputs: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names = [n.rstrip("?").removesuffix("...") for n in (*self.inputs, *self.outputs)] + list(self.attributes)
        duplicates = {n for n in names if names.count(n) > 1}
        if duplicates:
            raise GraphError(
                f"{self.name}: expected distinct names of inputs, outputs and attributes",
                got=f"{', '.join(sorted(duplicates))} twice",
            )

    @property
    def is_transparent(self) -> bool:
        """Whether a pattern may look through the op: it preserves elements, and their gradient, as Detach does not."""
        return self.preserves_elements and self.gradient is not NOT_DIFFERENTIABLE

    def view(self, node: ir.Node, wanted: Iterable[str] | None = None) -> NodeView:
        return NodeView(node, self, None if wanted is None else frozenset(wanted))

    def output_types(self, node: ir.Node) -> Sequence[TensorType]:
        return self.shapes(self.view(node))

    def output_count(self, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]) -> int:
        return self.count_outputs(inputs, attributes) if self.count_outputs else len(self.outputs)

    @functools.cached_property
    def slots(self) -> Mapping[str, Slot]:
        """The positions of inputs and outputs by name, without the marks `?` and `...`."""
        return {
            name.rstrip("?").removesuffix("..."): Slot(index, is_output, name.endswith("..."))
            for is_output, names in ((True, self.outputs), (False, self.inputs))
            for index, name in enumerate(names)
        }

    @functools.cached_property
    def required_attributes(self) -> frozenset[str]:
        """The attributes that have no default."""
        return frozenset(name for name, default in self.attributes.items() if default is REQUIRED)

    @functools.cached_property
    def has_alternatives(self) -> bool:
        """Whether some kernels have names: the fastest of them is chosen."""
        return any(kernel.name for kernel in self.kernels)

    def input_name(self, index: int) -> str:
        """Return the declared name of input `index`, without its mark; members of a variadic input share its name."""
        declared = self.inputs[min(index, len(self.inputs) - 1)]
        return declared.rstrip("?").removesuffix("...")

    def output_name(self, index: int) -> str:
        """Return the declared name of output `index`, without its mark."""
        declared = self.outputs[min(index, len(self.outputs) - 1)]
        return declared.rstrip("?").removesuffix("...")

    def axis_map(self, node: ir.Node) -> axis_maps.AxisMap | None:
        return axis_maps.parse(self.axes(self.view(node)))

    def kernel(self, node: ir.Node, device: str) -> Kernel:
        """Return the first kernel that applies to the node on this device type ("cpu", "cuda").

        Under `torch.use_deterministic_algorithms` the first deterministic one, if one applies.
        """
        view = self.view(node)
        applicable = (kernel for kernel in self.kernels if kernel.applies(view, device))
        first = next(applicable, None)
        if first is None:
            raise GraphError(f"no kernel of {self.name} applies on {device} to {node.name}")
        if first.deterministic or not torch.are_deterministic_algorithms_enabled():
            return first
        return next((kernel for kernel in applicable if kernel.deterministic), first)

    def candidates(self, node: ir.Node, device: str) -> tuple[Kernel, ...]:
        """Return the kernels of which the fastest is chosen, PyTorch's own first; one if there is no choice."""
        first = self.kernel(node, device)
        view = self.view(node)
        others = (k for k in self.kernels if k is not first and k.name and k.applies(view, device))
        if torch.are_deterministic_algorithms_enabled():
            others = (k for k in others if k.deterministic)
        return (first, *others) if first.name else (first,)


def numel(value: ir.Value | None) -> Size:
    """Return the number of elements of a value, as a size."""
    return 0 if value is None else sizes.multiply(1, *sizes.dims_of(value))
