"""Test ops against eager PyTorch: cases of ops, their checks, and ONNX oracles."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch

from onnxtrain.autodiff import differentiate
from onnxtrain.execute.kernel_choice.expected import expected_kernel
from onnxtrain.execute.program import KernelOf, Program
from onnxtrain.graph import sizes
from onnxtrain.graph.values import TensorType, rank_of, set_type
from onnxtrain.ops import NOT_DIFFERENTIABLE, Effects, NoBody, OpDef, builder, definition_of, lookup
from onnxtrain.ops.bodies import inline_bodies
from onnxtrain.ops.definition import OPSET
from onnxtrain.ops.dtypes import ONNX_DTYPES, TORCH_DTYPES
from onnxtrain.ops.interfaces.scalar_factors import SCALAR_FACTORS
from onnxtrain.plan.cut import cut, single_part
from onnxtrain.testing import assert_no_worse_than_eager
from onnxtrain.torch_compat.tensors import storage_id
from tests.device_under_test import device, on_cpu


@dataclass(frozen=True)
class Spec:
    """One input of an op case.

    Attributes:
        dims: sizes, separated by spaces: letters are symbolic, integers static, expressions (`2*h`) allowed. "" is 0-d.
        dtype: "float" for the dtype under test, "int64", "bool", or a torch dtype.
        low, high: range of random elements.
        make: (shape, dtype, generator) -> tensor, if uniformly random elements are unsuitable.
        value: makes the input a constant of the graph.
        grad: whether to differentiate with respect to it, if it is floating-point.
    """

    dims: str = ""
    dtype: str | torch.dtype = "float"
    low: float = -2.0
    high: float = 2.0
    make: Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor] | None = None
    value: Any = None
    grad: bool = True

    def type(self, dtype: torch.dtype) -> TensorType:
        """The graph type of the input, in the dtype under test."""
        return TensorType(ONNX_DTYPES[self.torch_dtype(dtype)], tuple(map(_size, self.dims.split())))

    def torch_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the input, in the dtype under test."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return {"float": dtype, "int64": torch.int64, "bool": torch.bool}[self.dtype]

    def tensor(self, symbols: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        """A random tensor for the input, at these sizes and in the dtype under test, on the device under test."""
        return self._sampled(symbols, dtype, generator).to(device())

    def _sampled(self, symbols: Mapping[str, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        shape = tuple(sizes.evaluate(_size(word), symbols) for word in self.dims.split())
        own_dtype = self.torch_dtype(dtype)
        if self.make is not None:
            return self.make(shape, own_dtype, generator)
        if own_dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if not own_dtype.is_floating_point:
            low, high = int(self.low), max(int(self.high), int(self.low) + 1)
            return torch.randint(low, high, shape, generator=generator).to(own_dtype)
        # Sampled in float32, so that every dtype gets the same elements up to rounding.
        return (torch.rand(shape, generator=generator) * (self.high - self.low) + self.low).to(own_dtype)


@dataclass(frozen=True)
class SizesOf:
    """An int64 vector of sizes, such as the input `shape` of Reshape and Expand."""

    dims: str


def _size(word: str) -> sizes.Size:
    return sizes.from_sympy(sizes.parse(int(word) if re.fullmatch(r"-?\d+", word) else word))


Input = Spec | SizesOf | None


@dataclass(frozen=True)
class OpCase:
    """One use of an op, and its reference in PyTorch.

    Attributes:
        reference: takes one tensor per input (None for an absent one, a tuple of ints for a SizesOf) and returns the
            outputs to compare; None skips an output.
        sizes: values of the symbolic sizes to run at; the default mixes odd sizes, 1 and 0.
        specials: also run with NaN, infinities, -0.0 and ties in the floating-point inputs.
        differentiate: compare gradients too, if the op is differentiable.
        bodies: compare the body too (False for random ops, whose body samples other values); a dtype if stock
            onnxruntime and `onnx.reference` have kernels for that dtype only.
        label: distinguishes the cases of one op in test names.
    """

    domain: str
    name: str
    inputs: tuple[Input, ...]
    reference: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[Mapping[str, int]] = ()
    specials: bool = False
    differentiate: bool = True
    bodies: bool | torch.dtype = True
    label: str = ""

    def __str__(self) -> str:
        return f"{self.domain or 'onnx'}-{self.name}{'-' + self.label if self.label else ''}"

    def op(self) -> tuple[str, str]:
        """The domain and the name of the op."""
        return self.domain, self.name

    def letters(self) -> tuple[str, ...]:
        """The symbolic sizes of the inputs, sorted."""
        words = (word for spec in self.inputs if spec for word in spec.dims.split())
        return tuple(sorted(set(itertools.chain.from_iterable(sizes.symbols(_size(word)) for word in words))))

    def size_sets(self) -> Iterator[Mapping[str, int]]:
        """Values for the symbolic sizes, one set for each run."""
        if self.sizes:
            yield from self.sizes
            return
        letters = self.letters()
        base = dict(zip(letters, itertools.cycle((3, 5, 2, 7, 4)), strict=False))
        yield base
        if letters:
            yield dict.fromkeys(letters, 1)
            yield {**base, letters[0]: 1}
            yield {**base, letters[-1]: 1, letters[0]: 9}
            yield {**base, letters[0]: 0}
            yield {**base, letters[-1]: 0}


def case_graph(case: OpCase, dtype: torch.dtype) -> ir.Model:
    """The one-node graph of a case, with inputs `x0`, `x1`, … and all outputs of the node."""
    inputs: list[ir.Value] = []
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=case.name)
    op = builder(graph)
    operands: list[ir.Value | None] = []
    for index, spec in enumerate(case.inputs):
        if isinstance(spec, Spec) and spec.value is None:
            value = ir.Value(name=f"x{index}")
            set_type(value, spec.type(dtype))
            inputs.append(value)
            graph.inputs.append(value)
            operands.append(value)
        elif isinstance(spec, Spec):
            operands.append(op.constant(spec.value, ONNX_DTYPES[spec.torch_dtype(dtype)]))
        else:
            operands.append(spec)  # type: ignore[arg-type]  # a SizesOf, replaced below: its symbols need all inputs
    operands = [op.sizes([_size(w) for w in o.dims.split()]) if isinstance(o, SizesOf) else o for o in operands]
    node = op.node(case.domain, case.name, operands, case.attributes)
    for index, value in enumerate(node.outputs):
        value.name = f"y{index}"
    graph.outputs.extend(node.outputs)
    for position, each_node in enumerate(graph):
        each_node.name = each_node.name or f"node_{position}"
        for index, value in enumerate(each_node.outputs):
            value.name = value.name or f"v{position}_{index}"
    return ir.Model(graph, ir_version=10)


def _outputs(result: Any, count: int) -> list[torch.Tensor | None]:
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    return outputs + [None] * (count - len(outputs))


@dataclass
class _Reference:
    """PyTorch's outputs and gradients for one set of inputs."""

    outputs: list[torch.Tensor | None]
    cotangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]

    def moved(self) -> _Reference:
        """Return it on the device under test."""
        tensors = (self.outputs, self.cotangents, self.gradients)
        return _Reference(*([None if t is None else t.to(device()) for t in each] for each in tensors))


class CaseCheck:
    """Run one case in one dtype. The graphs are built once and run at every set of sizes."""

    def __init__(
        self,
        case: OpCase,
        dtype: torch.dtype,
        kernels: KernelOf = expected_kernel,
        standard: Callable[[ir.Model], ir.Model] = inline_bodies,
    ) -> None:
        """Build the graphs; `kernels` chooses among the candidates of a node, `standard` makes the oracle's model."""
        self.case, self.dtype, self.kernels, self.standard = case, dtype, kernels, standard
        self.definition: OpDef = lookup(case.domain, case.name)
        self.model = case_graph(case, dtype)
        self.count = len(self.model.graph.outputs)
        self.forward = Program(single_part(self.model), f"{case}", device(), kernels)
        self._references: dict[tuple[Any, ...], tuple[_Reference, _Reference] | None] = {}
        self._joints: dict[tuple[bool, ...], Any] = {}  # by which outputs have a cotangent, as the next two
        self._programs: dict[tuple[bool, ...], tuple[Any, Program, Any]] = {}
        self._bodies: dict[tuple[bool, ...], tuple[Any, Oracle]] = {}
        self.specs = [s for s in case.inputs if isinstance(s, Spec) and s.value is None]
        self.wrt = [s.grad and s.torch_dtype(dtype).is_floating_point for s in self.specs]
        self.differentiable = (
            case.differentiate and self.definition.gradient is not NOT_DIFFERENTIABLE and any(self.wrt)
        )

    def tensors(self, symbols: Mapping[str, int], special: bool = False) -> list[torch.Tensor]:
        """Random inputs at these sizes; with `special` also NaN, infinities, -0.0 and ties."""
        generator = torch.Generator().manual_seed(17)
        tensors = [s.tensor(symbols, self.dtype, generator) for s in self.specs]
        if special:
            tensors = [_with_specials(t) if s.make is None else t for s, t in zip(self.specs, tensors, strict=True)]
        return tensors

    def expected(self, symbols: Mapping[str, int], special: bool = False) -> tuple[_Reference, _Reference] | None:
        """PyTorch's results in the dtype under test and in float64; None if PyTorch rejects the sizes."""
        key = (*symbols.items(), special)
        if key not in self._references:
            try:
                self._references[key] = self._expected(symbols, special)
            except (RuntimeError, IndexError, ValueError):
                self._references[key] = None
        return self._references[key]

    def _expected(self, symbols: Mapping[str, int], special: bool) -> tuple[_Reference, _Reference]:
        if device().type == "cpu":
            return self._both_references(symbols, special)
        with on_cpu():  # first, because an index out of range ends a process that uses a GPU
            on_host = self._both_references(symbols, special)
        try:
            return self._both_references(symbols, special)
        except (RuntimeError, IndexError, ValueError, TypeError):  # a reference for the CPU only
            return on_host[0].moved(), on_host[1].moved()

    def _both_references(self, symbols: Mapping[str, int], special: bool) -> tuple[_Reference, _Reference]:
        tensors = self.tensors(symbols, special)
        eager = self.reference(tensors, symbols, self.dtype)
        if self.dtype == torch.float64 or (device().type == "cuda" and self.definition.effects & Effects.RANDOM):
            return eager, eager  # on a GPU the elements that dropout drops depend on the dtype
        return eager, self.reference(tensors, symbols, torch.float64)

    def reference(self, tensors: Sequence[torch.Tensor], symbols: Mapping[str, int], dtype: torch.dtype) -> _Reference:
        """PyTorch's results with the inputs in `dtype`. Raises PyTorch's error if it rejects the sizes."""
        leaves = [
            t.detach().to(dtype if t.dtype == self.dtype else t.dtype).clone().requires_grad_(w and self.differentiable)
            for t, w in zip(tensors, self.wrt, strict=True)
        ]
        torch.manual_seed(3)
        arguments = self._arguments(leaves, symbols, dtype)
        with nullcontext() if device().type == "cpu" else device():  # where the reference makes tensors
            outputs = _outputs(self.case.reference(*arguments), self.count)
        generator = torch.Generator().manual_seed(23)
        cotangents = [
            torch.randn(o.shape, generator=generator).to(self.dtype).to(o)
            if o is not None and o.requires_grad
            else None
            for o in outputs
        ]
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o is not None and c is not None]
        differentiated = [leaf for leaf in leaves if leaf.requires_grad]
        gradients: list[torch.Tensor | None] = [None] * len(leaves)
        if pairs and differentiated:
            of_leaves = iter(
                torch.autograd.grad([o for o, _ in pairs], differentiated, [c for _, c in pairs], allow_unused=True)
            )
            gradients = [next(of_leaves) if leaf.requires_grad else None for leaf in leaves]
        return _Reference([None if o is None else o.detach() for o in outputs], cotangents, gradients)

    def _arguments(self, leaves: Sequence[torch.Tensor], symbols: Mapping[str, int], dtype: torch.dtype) -> list[Any]:
        remaining = iter(leaves)
        arguments: list[Any] = []
        for spec in self.case.inputs:
            if spec is None:
                arguments.append(None)
            elif isinstance(spec, SizesOf):
                arguments.append(tuple(sizes.evaluate(_size(word), symbols) for word in spec.dims.split()))
            elif spec.value is not None:
                arguments.append(torch.tensor(np.asarray(spec.value)).to(device(), spec.torch_dtype(dtype)))
            else:
                arguments.append(next(remaining))
        return arguments

    def check_sizes(self, symbols: Mapping[str, int], special: bool = False) -> bool:
        """Compare forward and gradients at one set of sizes. Returns False if PyTorch rejects the sizes."""
        expected = self.expected(symbols, special)
        if expected is None:
            return False
        eager, exact = expected
        tensors = self.tensors(symbols, special)
        where = f"{self.case} {dict(symbols)} {self.dtype}"
        torch.manual_seed(3)
        got, _ = self.forward.run(tensors, ())
        self._check_aliases(where, tensors, got)
        self._compare(f"{where} output", got, eager.outputs, exact.outputs)
        if self.differentiable and any(c is not None for c in eager.cotangents):
            gradients = self._gradients(tensors, eager.cotangents)
            self._compare(f"{where} gradient", gradients, eager.gradients, exact.gradients)
        return True

    def _check_aliases(self, where: str, tensors: Sequence[torch.Tensor], got: Sequence[torch.Tensor | None]) -> None:
        """An output that shares memory with an input must be declared, because kernels overwrite other outputs."""
        input_storages = {storage_id(t) for t in tensors}
        for index, output in enumerate(got):
            is_view = output is not None and storage_id(output) in input_storages
            is_declared = min(index, len(self.definition.outputs) - 1) in self.definition.aliases
            assert is_declared or not is_view, f"{where}: output {index} is a view of an input; add it to `aliases`"

    def _joint(self, with_cotangent: tuple[bool, ...]) -> Any:
        if with_cotangent not in self._joints:
            model = case_graph(self.case, self.dtype)
            self._joints[with_cotangent] = differentiate(model, self.wrt, with_cotangent)
        return self._joints[with_cotangent]

    def _gradients(
        self, tensors: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        with_cotangent = tuple(c is not None for c in cotangents)
        if with_cotangent not in self._programs:
            joint = self._joint(with_cotangent)
            parts = cut(joint)
            self._programs[with_cotangent] = (
                joint,
                Program(parts.forward, f"{self.case} forward", device(), self.kernels),
                Program(parts.backward, f"{self.case} backward", device(), self.kernels),
            )
        joint, forward, backward = self._programs[with_cotangent]
        torch.manual_seed(3)
        outputs, crossing = forward.run(tensors, ())
        kept = outputs[self.count :]
        passed = [c for c, v in zip(cotangents, joint.cotangents, strict=True) if v is not None]
        gradients, _ = backward.run([*kept, *passed], crossing)
        return list(gradients)

    @staticmethod
    def _compare(where: str, got: Sequence[Any], eager: Sequence[Any], exact: Sequence[Any]) -> None:
        for index, (g, e, x) in enumerate(zip(got, eager, exact, strict=False)):
            if e is None:
                continue
            if g is None:
                assert not e.any(), f"{where} {index}: none, eager has {e}"
                continue
            assert_no_worse_than_eager(f"{where} {index}", g, e, x)

    def check_body(self, symbols: Mapping[str, int], special: bool = False) -> bool:
        """Compare the inlined body on stock onnxruntime, forward and backward, with PyTorch."""
        expected = self.expected(symbols, special)
        if expected is None:
            return False
        eager, exact = expected
        tensors = self.tensors(symbols, special)
        where = f"{self.case} {dict(symbols)} {self.dtype} body"
        with_cotangent = tuple(c is not None for c in eager.cotangents)
        joint, oracle = self._body(with_cotangent if self.differentiable else (False,))
        if joint is not None:
            feeds = [*tensors, *(c for c, v in zip(eager.cotangents, joint.cotangents, strict=True) if v is not None)]
            got = oracle.run([f for f in feeds if f is not None])
            remaining = iter(got[self.count :])
            gradients = [next(remaining) if g is not None else None for g in joint.gradients]
            self._compare(f"{where} gradient", gradients, eager.gradients, exact.gradients)
        else:
            got = oracle.run(tensors)
        self._compare(where, got[: self.count], eager.outputs, exact.outputs)
        return True

    def _body(self, with_cotangent: tuple[bool, ...]) -> tuple[Any, Oracle]:
        """The inlined body, with its gradients if any output has a cotangent: one graph for all sizes, as in use."""
        if with_cotangent not in self._bodies:
            joint = self._joint(with_cotangent) if any(with_cotangent) else None
            model = self.model if joint is None else joint.model
            self._bodies[with_cotangent] = (joint, Oracle(self.standard(model)))
        return self._bodies[with_cotangent]

    def check_axes(self) -> None:
        """Select rows of the inputs along each axis in the axis map, and expect the same rows of the outputs."""
        node, arrays = self._node(), self._first_arguments()
        axis_map = self.definition.axis_map(node)
        if axis_map is None or self.definition.effects & Effects.RANDOM:
            return
        full = self._call(node, arrays)
        ranks = [None if v is None else rank_of(v) for v in node.inputs]
        out_ranks = [rank_of(v) for v in node.outputs]
        for output, rank in enumerate(out_ranks):
            if full[output] is None:
                continue
            for axis in range(rank):
                sources = axis_map.sources(axis, ranks, out_ranks, output)
                if sources is not None:
                    self._check_axis(node, arrays, full[output], output, axis, sources)

    def _check_axis(
        self, node: ir.Node, arrays: list[Any], full: Any, output: int, axis: int, sources: list[Any]
    ) -> None:
        extent = full.shape[axis]
        rows = torch.tensor([extent - 1, 0] if extent else [], device=device())
        picked = [
            a if s is None or not isinstance(a, torch.Tensor) or a.shape[s] == 1 != extent else a.index_select(s, rows)
            for a, s in zip(arrays, sources, strict=True)
        ]
        # An input named `shape` holds the sizes of the output, which has only the selected rows.
        picked = [
            (*a[:axis], len(rows), *a[axis + 1 :])
            if isinstance(a, tuple) and self.definition.input_name(i) == "shape"
            else a
            for i, a in enumerate(picked)
        ]
        got = self._call(node, picked)[output]
        expected = full.index_select(axis, rows)
        assert_no_worse_than_eager(f"{self.case}: axis {axis} of output {output}", got, expected, expected)

    def check_moves(self) -> None:
        """Give each element of the moved inputs a distinct value, and expect no other value and none twice."""
        moved = [
            i for i in range(len(self._node().inputs)) if self.definition.input_name(i) in self.definition.moved_inputs
        ]
        if not moved:
            return
        arrays = self._first_arguments()
        total = sum(arrays[i].numel() for i in moved)
        values = iter(torch.arange(total, dtype=self.dtype, device=device()).split([arrays[i].numel() for i in moved]))
        for i in moved:
            arrays[i] = next(values).view_as(arrays[i])
        outputs = torch.cat([y.flatten() for y in self._call(self._node(), arrays)])
        assert len(outputs.unique()) == len(outputs), f"{self.case}: an element occurs twice in the outputs"
        is_input_element = (outputs >= 0) & (outputs < total) & (outputs == outputs.round())
        assert is_input_element.all(), f"{self.case}: an output element is not an input element"

    def check_factor(self) -> None:
        """Scale each input that `SCALAR_FACTORS` names, and expect the output of the op with the factor folded in."""
        node, arrays = self._node(), self._first_arguments()
        build_factor = SCALAR_FACTORS.entry(node)
        factor = build_factor and build_factor(self.definition.view(node))
        if factor is None or self.definition.effects & Effects.RANDOM:
            return
        scale = 0.5
        for index in range(len(node.inputs)):
            if self.definition.input_name(index) in factor.inputs:
                expected = self._call(node, [scale * a if i == index else a for i, a in enumerate(arrays)])[0]
                if factor.scales_output:
                    assert torch.equal(scale * self._call(node, arrays)[0], expected), f"{self.case}: input {index}"
                build = factor.absorb or (lambda op, n, scale: None)
                outputs = build(builder(self.model.graph), self.definition.view(node), scale)
                if outputs is not None:
                    scaled = outputs[0].producer()
                    assert scaled is not None
                    got = self._call(scaled, arrays)[0]
                    assert_no_worse_than_eager(f"{self.case}: {scaled.op_type}", got, expected, expected)

    def _node(self) -> ir.Node:
        """The first node of the case's op."""
        return next(n for n in self.model.graph if n.op_type == self.case.name and n.domain == self.case.domain)

    def _first_arguments(self) -> list[Any]:
        symbols = next(iter(self.case.size_sets()))
        return self._arguments(self.tensors(symbols), symbols, self.dtype)

    def _call(self, node: ir.Node, arrays: list[Any]) -> list[Any]:
        definition = definition_of(node)
        kernel = definition.kernel(node, device().type)
        names = definition.inputs
        arguments = [
            tuple(a.tolist()) if i in kernel.host_inputs and isinstance(a, torch.Tensor) and a.ndim else
            a.item() if i in kernel.host_inputs and isinstance(a, torch.Tensor) else a
            for i, a in enumerate(arrays)
        ]  # fmt: skip
        if names[-1].endswith("..."):
            arguments = [*arguments[: len(names) - 1], tuple(arguments[len(names) - 1 :])]
        arguments += [None] * (len(names) - len(arguments))
        result = kernel.lower(definition.view(node), *arguments).evaluate()
        return list(result) if isinstance(result, (tuple, list)) else [result]

    @property
    def has_body(self) -> bool:
        """Whether to compare the op's body in this dtype."""
        return self.case.bodies in (True, self.dtype) and not isinstance(self.definition.body, NoBody)


def _with_specials(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.numel() < 6:
        return tensor
    flat = tensor.clone().reshape(-1)
    flat[:5] = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 0.0], dtype=tensor.dtype)
    flat[5] = flat[-1]
    return flat.reshape(tensor.shape)


# Oracles


class Oracle:
    """Run an ONNX model on stock onnxruntime, or on `onnx.reference` if onnxruntime lacks a kernel.

    Args:
        model: the model.
        by_reference: whether to run on `onnx.reference` in any case.
    """

    def __init__(self, model: ir.Model, *, by_reference: bool = False) -> None:
        self.model = model
        proto = ir.to_proto(model)
        if by_reference:
            self.session: Any = _by_reference(proto)
            return
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            self.session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's error types are not public
            if "NOT_IMPLEMENTED" not in str(error) and "Could not find an implementation" not in str(error):
                raise
            self.session = _by_reference(proto)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for these inputs."""
        feeds = {v.name: _array(t, v) for v, t in zip(self.model.graph.inputs, tensors, strict=True)}
        return [
            torch.from_numpy(
                np.asarray(r).astype(np.float32 if v.dtype == ir.DataType.BFLOAT16 else np.asarray(r).dtype)
            ).to(
                device(),
                TORCH_DTYPES[v.dtype],  # type: ignore[index]  # outputs are typed
            )
            for r, v in zip(self.session.run(None, feeds), self.model.graph.outputs, strict=True)
        ]


def run_model(model: ir.Model, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a model once by the oracle."""
    return Oracle(model).run(tensors)


def _by_reference(proto: Any) -> Any:
    from onnx.reference import ReferenceEvaluator  # slow to import, rarely needed
    from onnx.reference.op_run import OpRun

    class Erf(OpRun):
        """Erf in the precision of x; that of onnx rounds to float32."""

        op_domain = ""

        def _run(self, x: Any) -> tuple[Any]:
            return (np.vectorize(math.erf, otypes=[x.dtype])(x),)

    class Pad(OpRun):
        """Pad that also crops, by negative pads; that of onnx refuses them."""

        op_domain = ""

        def _run(self, x: Any, pads: Any, value: Any = None, axes: Any = None, mode: Any = None) -> tuple[Any]:
            axes = range(x.ndim) if axes is None else axes
            widths = [(0, 0)] * x.ndim
            for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
                end = x.shape[axis] + min(0, int(after))
                x = x.take(np.arange(-min(0, int(before)), end), axis)
                widths[axis] = (max(0, int(before)), max(0, int(after)))
            if mode in (None, "constant"):
                return (np.pad(x, widths, constant_values=0 if value is None else value),)
            return (np.pad(x, widths, mode=mode),)

    return ReferenceEvaluator(proto, new_ops=[Erf, Pad])


def _array(tensor: torch.Tensor, value: ir.Value) -> Any:
    if tensor.dtype == torch.bfloat16:
        assert value.dtype is not None
        return tensor.float().numpy(force=True).astype(value.dtype.numpy())
    return tensor.numpy(force=True)
