"""A program: one part of a plan as generated straight-line Python.

    def forward(arguments, sizes):
        input_ids, p_embeddings_weight = arguments
        s0 = input_ids.size(0)
        embedding = embedding_1(p_embeddings_weight, input_ids)      # embeddings.word_embeddings  modeling_bert.py:101
        ...
        return (loss, logits, kept_1, ...), (s0, s1)

There is one line per node, in the graph's order, and each tensor is freed after its last use. The source is registered
with `linecache`: tracebacks, debuggers and profilers show it, with the module path and source location of each node.
"""

from __future__ import annotations

import builtins
import enum
import itertools
import keyword
import linecache
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxtrain.execute.host_batch import NumberOnHost
from onnxtrain.execute.host_source import HostInt, ShapeSource
from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.graph.alias import view_source
from onnxtrain.graph.values import dtype_of, rank_of
from onnxtrain.ops import OpDef, definition_of
from onnxtrain.ops.definition import DEVICE, Call, Infix, InPlaceCapableCall, Kernel, Method, Property
from onnxtrain.ops.dtypes import TORCH_DTYPES
from onnxtrain.ops.interfaces.host_reads import HOST_READS
from onnxtrain.ops.reshape.shape import sizes_on_device
from onnxtrain.plan.channels_last import ChannelsLast, made_contiguous
from onnxtrain.plan.cut import Part
from onnxtrain.plan.in_place import in_place_inputs, last_uses
from onnxtrain.plan.streams import Phase, number_part, number_source, steps
from onnxtrain.system.time_limit import check_time
from onnxtrain.torch_compat import dispatch
from onnxtrain.torch_compat.operators import OpOverload, direct_call

_SERIAL = itertools.count(1)
KernelOf = Callable[[ir.Node, str], Kernel]
FusedCalls = Mapping[ir.Node, "FusedCall"]  # by the first node of each
Results = tuple[tuple[Any, ...], tuple[int, ...]]
Run = Callable[[Iterable[torch.Tensor], Sequence[int]], Results]


class FusedCall(Protocol):
    """Computes several adjacent nodes of a part in one call: tensors -> tensors."""

    @property
    def part(self) -> Part:
        """The nodes, with their inputs and the outputs that other nodes read."""

    def __call__(self, *tensors: torch.Tensor) -> Sequence[torch.Tensor]: ...


class Program:
    """The compiled form of one part.

    Attributes:
        part: the part of the plan that it runs.
        source: the generated Python.
        run: (tensors, sizes) -> (tensors, sizes), in the order of the part's inputs and outputs.
        filename: the name under which debuggers and profilers find the source.
        namespace: the globals of the source.
    """

    def __init__(
        self,
        part: Part,
        name: str,
        device: torch.device,
        kernels: KernelOf = expected_kernel,
        entry: Sequence[ir.Value] | None = None,
        layout: ChannelsLast | None = None,
        fused_calls: FusedCalls | None = None,
    ) -> None:
        """Write and load the source.

        Args:
            part: the nodes to run.
            name: a title.
            device: where the program runs.
            kernels: the kernel of a node, from the node and the type of the device.
            entry: inputs whose shapes `run` checks. If they differ from those in `namespace` ("shape_0", …; None at
                first), and the third argument is not True, it calls "other_shapes" of `namespace` with a list of the
                tensors, and the sizes.
            layout: which values are channels_last.
            fused_calls: nodes that run as one call.
        """
        self.part, self._name, self._device, self._kernels, self._layout = part, name, device, kernels, layout
        self._fused_calls = fused_calls or {}
        writer = _Writer(part, name, device, kernels, layout, ranges=False, entry=entry, fused_calls=self._fused_calls)
        self.source = writer.source()
        self.filename = f"<onnxtrain {name} #{next(_SERIAL)}>"
        writer.namespace.update(profiling=dispatch.profiler_enabled, profiled=self._profiled)
        self.namespace = writer.namespace
        self.run = self._load(self.source, self.filename, writer.namespace)
        self._ranged: Run | None = None

    def __deepcopy__(self, memo: object) -> Program:
        """Return itself: a module that runs a program can be copied, and its copies run the same code."""
        return self

    def _profiled(self, tensors: Iterable[torch.Tensor], sizes: Sequence[int]) -> Results:
        """Run the program with a profiler range per node; it is generated when a profiler first runs."""
        if self._ranged is None:
            writer = _Writer(
                self.part,
                self._name,
                self._device,
                self._kernels,
                self._layout,
                ranges=True,
                fused_calls=self._fused_calls,
            )
            self._ranged = self._load(writer.source(), f"{self.filename[:-1]} profiled>", writer.namespace)
        return self._ranged(tensors, sizes)

    @staticmethod
    def _load(source: str, filename: str, namespace: dict[str, Any]) -> Run:
        lines = source.splitlines(keepends=True)
        linecache.cache[filename] = (len(source), None, lines, filename)
        exec(compile(source, filename, "exec"), namespace)  # our own generated source
        run: Run = namespace["program"]
        return run


def drain(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Empty a list: yield its tensors in order, none of which it keeps alive."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()


class _Ref(str):
    """The name of a local variable."""

    __slots__ = ()


class _Writer:
    """Writes the source of one part."""

    def __init__(
        self,
        part: Part,
        name: str,
        device: torch.device,
        kernels: KernelOf,
        layout: ChannelsLast | None,
        ranges: bool,
        entry: Sequence[ir.Value] | None = None,
        fused_calls: FusedCalls | None = None,
    ) -> None:
        self._part = part
        self._fused_calls = fused_calls or {}
        self._title = name
        self._device = device
        self._kernels = {node: kernels(node, device.type) for node in part.nodes if not _is_host(node, part)}
        self._layout = layout
        self._ranges = ranges
        self._entry = entry
        self.namespace: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
        self._names: dict[ir.Value, _Ref] = {}
        self._host: dict[ir.Value, Any] = {}
        self._globals: dict[int, str] = {}
        self._used_names: set[str] = {
            "arguments",
            "sizes",
            "program",
            "profiling",
            "profiled",
            "record",
            "other_shapes",
            "any_shapes",
            *(f"shape_{i}" for i in range(len(entry or ()))),
            "_",
            *dir(builtins),  # sizes call min, max and int, and kernels may have these names
            *self.namespace,
        }
        self._lines: list[str] = []
        self._pending: dict[ir.Node, str] = {}  # the local with the number that it reads
        self._last = last_uses(part)
        self._overwritten = in_place_inputs(part, self._last, self._kernels)

    # Structure

    def source(self) -> str:
        part = self._part
        any_shapes = "" if self._entry is None else ", any_shapes=False"
        self._line(f"def program(arguments, sizes{any_shapes}):", indent=0)
        if not self._ranges:
            self._line("if profiling(): return profiled(arguments, sizes)")
        if part.inputs:
            self._line(f"{_tuple_source([self._name(v) for v in part.inputs])} = arguments")
        if self._entry is not None:
            self._check_shapes(self._entry)
        if part.sizes_in:
            names = [self._fresh(v.name or "size") for v in part.sizes_in]
            self._line(f"{_tuple_source(names)} = sizes")
            for value, name in zip(part.sizes_in, names, strict=True):
                self._host[value] = (HostInt(name),) if rank_of(value) == 1 else HostInt(name)
        unread = [self._name(v) for v in part.inputs if v not in self._last]
        if unread:
            self._line(f"del {', '.join(unread)}")
        self._numbers_on_host()
        fused_nodes = {node for call in self._fused_calls.values() for node in call.part.nodes}
        positions = {node: position for position, node in enumerate(part.nodes)}
        for node, phase in steps(part):
            position = positions[node]
            if phase is Phase.START_READ:
                self._start_read(node)
            elif node in self._fused_calls:
                self._fused_call(self._fused_calls[node], position)
            elif node not in fused_nodes:
                self._node(node, position)
        tensors = [self._output(v, i < part.num_user_outputs) for i, v in enumerate(part.outputs)]
        sizes = [_host_scalar(self._host[v]) for v in part.sizes_out]
        self._line(f"return {_tuple_source(tensors)}, {_tuple_source(sizes)}")
        if self._ranges:
            self.namespace["record"] = torch.profiler.record_function
        return "\n".join([f'"""{self._title}: generated by onnxtrain."""', "", *self._lines, ""])

    def _check_shapes(self, entry: Sequence[ir.Value]) -> None:
        """Pass calls with other shapes to `other_shapes`. Without dynamic sizes, the one shape is the empty tuple.

        The arguments are passed in a list that can be emptied: nothing here keeps them alive.
        """
        shapes = [f"{self._name(v)}.shape" for v in entry] or ["()"]
        self.namespace.update((f"shape_{i}", None) for i in range(len(shapes)))
        others = " or ".join(f"{shape} != shape_{i}" for i, shape in enumerate(shapes))
        names = ", ".join(self._name(v) for v in self._part.inputs)
        self._line(f"if not any_shapes and ({others}):")
        self._line(f"arguments = [{names}]", indent=2)
        if names:
            self._line(f"del {names}", indent=2)
        self._line("return other_shapes(arguments, sizes)", indent=2)

    def _output(self, value: ir.Value | None, is_user_output: bool) -> str:
        if value is None:
            return "None"
        if is_user_output and self._layout is not None and self._layout.is_made_contiguous(value):
            if self._layout.is_channels_last(value):
                return f"{self._global('made_contiguous', made_contiguous)}({self._tensor(value)})"
            return f"{self._tensor(value)}.contiguous()"  # a weight's gradient: nobody sees strides of axes of size 1
        # The user may change an output in place, so a constant, or a view of one, is cloned.
        return f"{self._tensor(value)}.clone()" if _shares_constant(value) else self._tensor(value)

    def _line(self, text: str, indent: int = 1, comment: str = "") -> None:
        text = "    " * indent + text
        self._lines.append(f"{text:<96}  # {comment}" if comment else text)

    def _node(self, node: ir.Node, position: int) -> None:
        check_time()
        definition = definition_of(node)
        if _is_host(node, self._part):
            self._host_node(node, definition)
        else:
            self._tensor_node(node, definition)
        dead = [v for v in dict.fromkeys(node.inputs) if v is not None and self._is_last_use(v, position)]
        names = [str(self._names.pop(v)) for v in dead if v in self._names]
        if node in self._pending:
            names.append(self._pending.pop(node))
        if any(v not in self._last for v in node.outputs) and not self._part.host.issuperset(node.outputs):
            names.append("_")
        if names:
            self._line(f"del {', '.join(names)}")

    def _fused_call(self, call: FusedCall, position: int) -> None:
        nodes, inputs = call.part.nodes, call.part.inputs
        targets = [self._name(v) for v in call.part.outputs if v is not None]
        arguments = ", ".join(self._name(v) for v in inputs)
        text = f"{_tuple_source(targets)} = {self._global('region', call)}({arguments})"
        comment = " + ".join(node.op_type for node in nodes)
        if self._ranges:
            self._line(f"with record({comment!r}):")
        self._line(text, indent=2 if self._ranges else 1, comment=comment)
        dead = [str(self._names.pop(v)) for v in inputs if self._is_last_use(v, position + len(nodes) - 1)]
        if dead:
            self._line(f"del {', '.join(dead)}")

    def _is_last_use(self, value: ir.Value, position: int) -> bool:
        return self._last.get(value, -1) <= position and value.const_value is None

    # Nodes

    def _host_node(self, node: ir.Node, definition: OpDef) -> None:
        arguments = [
            ShapeSource(self._name(v)) if v is not None and definition.input_name(i) in definition.shape_only_inputs
            else self._host_argument(v)
            for i, v in enumerate(node.inputs)
        ]  # fmt: skip
        assert definition.host_eval is not None
        result = definition.host_eval(definition.view(node), *arguments)
        results = result if len(node.outputs) > 1 else (result,)
        for value, computed in zip(node.outputs, results, strict=True):
            if isinstance(computed, tuple):
                self._host[value] = tuple(self._host_local(value, c) for c in computed)
            else:
                self._host[value] = self._host_local(value, computed)

    def _host_local(self, value: ir.Value, computed: Any) -> Any:
        """Assign a compound expression to a local, to compute it once."""
        if not isinstance(computed, HostInt) or computed.source.isidentifier():
            return computed
        name = self._fresh(value.name or "size")
        self._line(f"{name} = {computed.source}")
        return HostInt(name)

    def _numbers_on_host(self) -> None:
        """Compute the numbers that nodes read, if the host knows the batch."""
        for node in self._part.nodes:
            if node not in self._part.early_reads or (part := number_part(self._part, node)) is None:
                continue
            read = HOST_READS.entry(node)
            assert read is not None
            program = Program(part, f"{self._title} {node.name}", torch.device("cpu"))
            number = self._global("number_on_host", NumberOnHost(program.run, read.start))
            pending = self._pending[node] = self._fresh("pending")
            self._line(f"{pending} = {number}({', '.join(self._name(v) for v in part.inputs)})", comment=_origin(node))

    def _start_read(self, node: ir.Node) -> None:
        """Launch the copy of the number that a later node reads, unless the host knows it."""
        value, read = number_source(node), HOST_READS.entry(node)
        assert read is not None
        start, asks_host = self._global("start_read", read.start), node in self._pending
        pending = self._pending[node] if asks_host else self._fresh("pending")
        self._pending[node] = pending
        condition = f"if {pending} is None: " if asks_host else ""
        self._line(f"{condition}{pending} = {start}({self._tensor(value)})", comment=_origin(node))

    def _tensor_node(self, node: ir.Node, definition: OpDef) -> None:
        kernel = self._kernels[node]
        view = definition.view(node)
        arguments = self._arguments(node, definition, kernel)
        if self._layout is not None:
            arguments = self._layout.convert_arguments(node, arguments)
        call = kernel.lower(view, *arguments)
        if node in self._pending and (read := HOST_READS.entry(node)) is not None:
            call = Call(read.finish, _Ref(self._tensor(number_source(node))), _Ref(self._pending[node]))
        if node in self._overwritten:
            call = _in_place(call) or call
        targets = [self._name(v) if v in self._last else "_" for v in node.outputs]
        comment = _origin(node)
        text = f"{', '.join(targets)} = {self._expression(call)}" if targets else self._expression(call)
        if self._ranges:
            label = f"{node.op_type} {node.metadata_props.get('module', '')}".strip()
            self._line(f"with record({label!r}):")
            self._line(text, indent=2, comment=comment)
        else:
            self._line(text, comment=comment)

    def _arguments(self, node: ir.Node, definition: OpDef, kernel: Kernel) -> list[Any]:
        literal = kernel.accepts_scalars and not all(v is None or _is_scalar_constant(v) for v in node.inputs)
        if_known = kernel.host_inputs_if_known(definition.view(node))
        arguments = [
            self._argument(
                v, i in kernel.host_inputs or (i in if_known and v in self._host), kernel.accepts_scalars, literal
            )
            for i, v in enumerate(node.inputs)
        ]
        declared = definition.inputs
        if declared and declared[-1].endswith("..."):
            fixed = len(declared) - 1
            return [*arguments[:fixed], tuple(arguments[fixed:])]
        return arguments + [None] * (len(declared) - len(arguments))

    def _argument(self, value: ir.Value | None, host: bool, scalars: bool, literal: bool) -> Any:
        if value is None:
            return None
        if host:
            return self._host_argument(value)
        if literal and _is_scalar_constant(value):
            return _scalar(value)
        if scalars and value in self._host and not isinstance(self._host[value], tuple):
            return self._host[value]
        return _Ref(self._tensor(value))

    def _host_argument(self, value: ir.Value | None) -> Any:
        if value is None:
            return None
        if value in self._host:
            return self._host[value]
        if value.const_value is not None:
            array = value.const_value.numpy()
            return array.item() if array.ndim == 0 else tuple(array.tolist())
        if rank_of(value) == 0:
            return HostInt(f"{self._name(value)}.item()")
        count = value.shape[0] if value.shape is not None else None
        assert isinstance(count, int), f"{value.name} has no fixed length"
        return tuple(HostInt(f"{self._name(value)}[{i}].item()") for i in range(count))

    # Values

    def _tensor(self, value: ir.Value) -> str:
        """Return the source of a tensor: a local, a constant, or a size converted to a tensor."""
        if value in self._host:
            convert = self._global("sizes_on_device", sizes_on_device)
            return f"{convert}({self._literal(self._host[value])}, {self._literal(DEVICE)})"
        if value.const_value is not None:
            return self._constant(value)
        return self._name(value)

    def _constant(self, value: ir.Value) -> str:
        if value not in self._names:
            name = self._fresh(value.name or "constant")
            self.namespace[name] = constant_tensor(value).to(self._device)
            self._names[value] = _Ref(name)
        return self._names[value]

    def _name(self, value: ir.Value) -> _Ref:
        if value not in self._names:
            self._names[value] = _Ref(self._fresh(value.name or "value"))
        return self._names[value]

    def _fresh(self, base: str) -> str:
        """Return a name that the source does not use yet, from `base`."""
        base = re.sub(r"\W", "_", base)
        if not base or base[0].isdigit() or keyword.iskeyword(base):
            base = f"v_{base}"
        name, suffix = base, 1
        while name in self._used_names:
            suffix += 1
            name = f"{base}_{suffix}"
        self._used_names.add(name)
        return name

    # Expressions

    def _expression(self, call: Call) -> str:
        if isinstance(call, Infix):
            left, right = (self._operand(a) for a in call.args)
            return f"{left} {call.symbol} {right}"
        named = [f"{k}={self._literal(v)}" for k, v in call.kwargs.items()]
        if isinstance(call, Method):
            receiver, *rest = call.args
            if isinstance(call, Property):
                return f"{self._operand(receiver)}.{call.name}"
            return f"{self._operand(receiver)}.{call.name}({', '.join([*map(self._literal, rest), *named])})"
        return f"{self._function(call.function)}({', '.join([*map(self._literal, call.args), *named])})"

    def _operand(self, argument: Any) -> str:
        text = self._literal(argument)
        simple = isinstance(argument, (_Ref, HostInt)) or (
            isinstance(argument, (int, float)) and not text.startswith("-")
        )
        return text if simple else f"({text})"

    def _literal(self, argument: Any) -> str:
        match argument:
            case _Ref():
                return str(argument)
            case HostInt():
                return argument.source
            case Call():
                return self._expression(argument)
            case tuple():
                return _tuple_source([self._literal(a) for a in argument])
            case list():
                return f"[{', '.join(self._literal(a) for a in argument)}]"
            case enum.Enum() if argument is DEVICE:
                return self._global("device", self._device)
            case None | bool() | int() | float() | str() | torch.dtype() | torch.memory_format() | torch.layout():
                return repr(argument)
            case complex():
                return repr(argument)
            case slice():
                parts = (argument.start, argument.stop, argument.step)
                return f"slice({', '.join(map(self._literal, parts))})"
        return self._global(type(argument).__name__, argument)

    def _function(self, function: Callable[..., Any]) -> str:
        name = getattr(function, "__name__", None) or type(function).__name__
        if isinstance(function, OpOverload):
            function = direct_call(function)
        return self._global("kernel" if name == "<lambda>" else name, function)

    def _global(self, base: str, target: Any) -> str:
        """Return the name of a Python object among the source's globals."""
        name = self._globals.get(id(target))
        if name is None:
            name = self._globals[id(target)] = self._fresh(base)
            self.namespace[name] = target
        return name


def _is_host(node: ir.Node, part: Part) -> bool:
    """Return whether a node is size arithmetic, done on Python ints."""
    return bool(node.outputs) and part.host.issuperset(node.outputs)


_IN_PLACE = {"+": "add_", "-": "sub_", "*": "mul_", "/": "div_"}


def _in_place(call: Call) -> Call | None:
    """Return the call that overwrites its first argument with the result; None if there is none."""
    if not call.args or not isinstance(call.args[0], _Ref):
        return None
    if isinstance(call, InPlaceCapableCall):
        return Call(call.in_place, *call.args)
    if isinstance(call, Infix):
        method = _IN_PLACE.get(call.symbol, "")
    else:
        name = getattr(call.function, "__name__", "")
        method = f"{name}_" if getattr(torch, name, None) is call.function else ""
    return Method(method, *call.args, **call.kwargs) if hasattr(torch.Tensor, method) else None


def _tuple_source(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _host_scalar(value: Any) -> str:
    single = value[0] if isinstance(value, tuple) else value
    return repr(single)


def _origin(node: ir.Node) -> str:
    props = node.metadata_props
    gradient = "grad of " if "gradient_of" in props else ""
    line = re.sub(r"^.*[/\\]", "", props.get("line", ""))  # without the folder
    return f"{gradient}{props.get('module', '')}  {line}".strip()


def _shares_constant(value: ir.Value) -> bool:
    """Return whether a value is a constant or may be a view of one."""
    node, source = value.producer(), value
    while node is not None:
        viewed = view_source(node, source.index() or 0, definition_of(node))
        if viewed is None:
            return False
        node, source = viewed.producer(), viewed
    return source.const_value is not None


def _is_scalar_constant(value: ir.Value) -> bool:
    return value.const_value is not None and rank_of(value) == 0


def _scalar(value: ir.Value) -> Any:
    if "scalar" in value.meta:
        return value.meta["scalar"]
    assert value.const_value is not None
    return value.const_value.numpy().item()


def constant_tensor(value: ir.Value) -> torch.Tensor:
    """Return a constant of the graph as a torch tensor of its element type."""
    assert value.const_value is not None
    tensor = value.meta.get("tensor")
    if isinstance(tensor, torch.Tensor):
        return tensor
    array = value.const_value.numpy()
    dtype = TORCH_DTYPES[dtype_of(value)]
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.astype("float32").copy()).to(dtype)
    return torch.from_numpy(array.copy()).to(dtype)
