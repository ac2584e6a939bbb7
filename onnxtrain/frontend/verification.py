"""Compare a model's graph with eager PyTorch, and name the first operator that differs.

    verdict = onnxtrain.verify(model, {"input_ids": ids, "labels": labels})
    assert verdict.is_right, verdict

Outputs and gradients are checked by the tolerance of onnxtrain's own tests (`execute/tolerance.py`). If one is off, the
exported graph runs in PyTorch with autograd, and the optimized graph runs with onnxtrain's kernels. Among the values
that both graphs have, the first one to differ in execution order gives the operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.export.graph_signature import InputKind

from onnxtrain.autodiff import differentiate
from onnxtrain.capture.capture import Captured
from onnxtrain.capture.guards.shape_proof import Proof
from onnxtrain.capture.refusals import common_device
from onnxtrain.capture.structure import flatten_call, flatten_output
from onnxtrain.errors import OptionError
from onnxtrain.execute.program import Program
from onnxtrain.execute.tolerance import error_and_bound, is_noise, noisiest, perturbed
from onnxtrain.frontend.engine import Engine
from onnxtrain.frontend.entry_point import EntryPoint
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.frontend.prepare import unprepare
from onnxtrain.graph import traversal
from onnxtrain.graph.values import is_float
from onnxtrain.options import FallbackPolicy, Options
from onnxtrain.passes import JOINT, optimize
from onnxtrain.plan.cut import single_part
from onnxtrain.torch_compat import pytree

_SEED = 20_251


@dataclass(frozen=True)
class Difference:
    """The largest absolute error of one tensor against float64, and the error that the tolerance allows."""

    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class FirstOperator:
    """The first operator whose result differs.

    Attributes:
        op: its name in the graph, as `domain::Name`.
        value: the result: a value of forward, or the gradient of one.
        where: the module and source location.
        error: the largest absolute error against float64.
        allowed: the error that the tolerance allows.
    """

    op: str
    value: str
    where: str
    error: float
    allowed: float


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`.

    Attributes:
        tensors: the outputs, then the gradients of parameters and inputs.
        first: the first operator that differs; None if none does, or if it could not be located.
    """

    tensors: tuple[Difference, ...]
    first: FirstOperator | None = None

    @property
    def is_right(self) -> bool:
        """Whether every tensor is within the tolerance."""
        return all(tensor.is_right for tensor in self.tensors)

    def __str__(self) -> str:
        wrong = [tensor for tensor in self.tensors if not tensor.is_right]
        if not wrong:
            worst = max((t.error / t.allowed for t in self.tensors if t.allowed), default=0.0)
            agreed = f"{len(self.tensors)} tensors agree with eager PyTorch"
            return f"right: {agreed} (the largest error is {worst:.0%} of the tolerance)"
        lines = [f"WRONG: {len(wrong)} of {len(self.tensors)} tensors differ from eager PyTorch"]
        lines += [f"  {t.name}: error {t.error:.3g}, allowed {t.allowed:.3g}" for t in wrong[:10]]
        if len(wrong) > 10:
            lines.append(f"  and {len(wrong) - 10} more")
        if self.first is None:
            lines.append(
                "no single operator is off by itself; try again with kernels='pytorch' to rule out native kernels"
            )
        else:
            f = self.first
            lines.append(f"first difference: {f.op}, output {f.value} ({f.where or 'unknown source location'})")
            lines.append(f"  error {f.error:.3g}, allowed {f.allowed:.3g}")
        return "\n".join(lines)


def verify(model: torch.nn.Module, batch: Any, **options: Any) -> Verdict:
    """Compare one forward and backward pass with eager PyTorch, and print the verdict.

    Args:
        model: any module; an ORTModule or a prepared module is unwrapped. The model is not modified: copies of it run,
            in its current mode (training or evaluation).
        batch: its inputs: a dict of keyword arguments, a tuple of positional ones, or one tensor.
        **options: any field of `onnxtrain.Options`. `rng` is always "torch": both sides sample the same dropout.

    Raises:
        ORTModuleFallbackException: the model cannot be captured as a graph.
        OptionError: the model's output has no tensors to compare.
    """
    source = model.module if isinstance(model, ORTModule) else model
    args, kwargs = _call(batch)
    settings = Options.resolve(**{"fallback_policy": FallbackPolicy.FALLBACK_DISABLE, **options, "rng": "torch"})
    module = unprepare(copy.deepcopy(source))
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    engine = Engine(module, settings, EntryPoint(is_part=True))
    sides = (
        _Side(module, lambda *a, **k: engine(a, k), args, kwargs, None),
        _Side(eager, eager, args, kwargs, None),
        _Side(exact, exact, args, kwargs, torch.float64),
    )
    got, theirs, right = (side.run() for side in sides)

    def samples() -> Iterator[dict[str, torch.Tensor]]:
        return (_Side(sample, sample, args, kwargs, None).run() for sample in perturbed(eager))

    verdict = Verdict(tuple(_differences(got, theirs, right, samples)))
    if not verdict.tensors:
        raise OptionError(
            "The model's output has no tensors to compare.",
            expected="at least one tensor in the output",
            got="none",
            todo="Let forward return the tensors to compare.",
        )
    if not verdict.is_right:
        whole = Engine(module, settings, EntryPoint(is_part=True, omits_blocks=False))
        whole(args, kwargs)
        captured = whole.newest().captured
        verdict = Verdict(verdict.tensors, _first_operator(captured, eager, flatten_call(args, kwargs)[0]))
    print(verdict)  # noqa: T201  documented behaviour
    return verdict


def _call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def _to(value: Any, dtype: torch.dtype | None) -> Any:
    """Return a copy of a tensor on the same device, a floating one cast to `dtype`.

    Anything else is returned as it is.
    """
    if not isinstance(value, torch.Tensor):
        return value
    copied = value.detach().clone()
    if dtype is not None and copied.is_floating_point():
        copied = copied.to(dtype)
    return copied.requires_grad_(value.requires_grad)


class _Side:
    """A module, the function that runs it, and its inputs: one side of a comparison."""

    def __init__(
        self,
        module: torch.nn.Module,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dtype: torch.dtype | None,
    ) -> None:
        self._module, self._run = module, run
        self._args, self._kwargs = pytree.tree_map(lambda value: _to(value, dtype), (args, kwargs))

    def run(self) -> dict[str, torch.Tensor]:
        """Return the outputs and gradients by name."""
        with torch.random.fork_rng(_gpus(self._module)):
            torch.manual_seed(_SEED)
            leaves, structure = flatten_output(self._run(*self._args, **self._kwargs))
            outputs = {n: t for n, t in zip(structure.names, leaves, strict=False) if isinstance(t, torch.Tensor)}
            results = {f"output {name}": tensor for name, tensor in outputs.items()}
            with_gradient = [t for t in outputs.values() if t.requires_grad]
            if with_gradient and torch.is_grad_enabled():
                inputs = dict(_differentiable(self._module, self._args, self._kwargs))
                gradients = torch.autograd.grad(
                    with_gradient, list(inputs.values()), _cotangents(with_gradient), allow_unused=True
                )
                results |= {f"gradient of {n}": g for n, g in zip(inputs, gradients, strict=True) if g is not None}
        return results


def _gpus(module: torch.nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})


def _differentiable(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    for name, value in pytree.tree_flatten_with_path((args, kwargs))[0]:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield f"input {pytree.keystr(name)}", value


def _cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same values for each side, whatever its dtype: one for a scalar loss, random values elsewhere."""
    generator = torch.Generator().manual_seed(_SEED)
    cotangents = []
    for output in outputs:
        values = torch.randn(output.shape, generator=generator, dtype=torch.float32) if output.dim() else torch.ones(())
        cotangents.append(values.to(torch.bfloat16).to(output.device, output.dtype))  # exact in every dtype
    return cotangents


def _differences(
    got: Mapping[str, torch.Tensor],
    eager: Mapping[str, torch.Tensor],
    exact: Mapping[str, torch.Tensor],
    samples: Callable[[], Iterator[Mapping[str, torch.Tensor]]],
) -> Iterator[Difference]:
    """Compare tensors by name. `samples` runs eager with perturbed parameters, for gradients that are noise."""
    largest = {kind: _largest(t for n, t in exact.items() if n.startswith(kind)) for kind in ("output", "gradient")}
    for name in dict.fromkeys((*eager, *got)):
        if name not in got or name not in eager or got[name].shape != eager[name].shape:
            yield Difference(name, float("inf"), 0.0)
            continue
        scale = largest["gradient"] if name.startswith("gradient") else 0.0
        mine, theirs, right = (side[name].detach() for side in (got, eager, exact))
        error, allowed, _ = error_and_bound(mine, theirs, right, scale)
        if error > allowed and name.startswith("gradient") and is_noise(error, right):
            theirs = noisiest([theirs, *(sample[name].detach() for sample in samples())], right)
            error, allowed, _ = error_and_bound(mine, theirs, right, scale)
        yield Difference(name, error, allowed)


def _largest(tensors: Iterator[torch.Tensor]) -> float:
    finite = (t.detach().double().nan_to_num(posinf=0.0, neginf=0.0).abs() for t in tensors if t.numel())
    return max((t.max().item() for t in finite), default=0.0)


# The first operator that differs


def _first_operator(
    captured: Captured, module: torch.nn.Module, tensors: Sequence[torch.Tensor]
) -> FirstOperator | None:
    """Return the first node of the joint graph whose result is off, among values that the exported graph also has."""
    exported = captured.guards.exported
    if exported is None or any(source.kind in ("part", "outside") for source in captured.sources):
        return None
    own = _own_tensors(captured, module)
    inputs = [own[s.name] if s.kind != "input" else tensors[s.index] for s in captured.sources]
    inputs = [_to(tensor, None) for tensor in inputs]
    wrt = tuple(t.requires_grad for t in inputs)
    eager = _values_in_torch(exported, captured, inputs, None)
    exact = _values_in_torch(exported, captured, inputs, torch.float64)
    nodes, got = _values_of_graph(captured, inputs, wrt, eager)
    largest = _largest(iter(exact.values()))
    for node in nodes:
        for value in node.outputs:
            name = str(value.name)
            if name in got and name in eager and name in exact and got[name].shape == eager[name].shape:
                error, allowed, _ = error_and_bound(got[name], eager[name], exact[name], largest)
                if not error <= allowed:
                    op = f"{node.domain or 'ai.onnx'}::{node.op_type}"
                    return FirstOperator(op, name, traversal.origin(node) or "", error, allowed)
    return None


def _own_tensors(captured: Captured, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for source in captured.sources:
        if source.kind != "input":
            path, _, name = source.name.rpartition(".")
            tensors[source.name] = getattr(module.get_submodule(path), name)
    return tensors


def _values_in_torch(
    exported: Proof, captured: Captured, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return each value of the exported graph as PyTorch computes it, and its gradient as `grad_<value>`."""
    own = {s.name: _to(t, dtype) for s, t in zip(captured.sources, inputs, strict=True) if s.kind != "input"}
    call_arguments = iter([_to(t, dtype) for s, t in zip(captured.sources, inputs, strict=True) if s.kind == "input"])
    constants = iter([_to(t, dtype) for t in exported.constants])
    arguments = []
    placeholders = sum(node.op == "placeholder" for node in exported.graph_module.graph.nodes)
    for kind, target in exported.signature[:placeholders]:
        name = str(target or "").removeprefix("module.")
        if kind == InputKind.USER_INPUT:
            arguments.append(next(call_arguments))
        else:
            constant = next(constants) if kind == InputKind.CONSTANT_TENSOR else None
            arguments.append(own.get(name, constant))
    run = _Recorder(exported.graph_module)
    with torch.random.fork_rng([t.device.index or 0 for t in inputs if t.is_cuda]):
        torch.manual_seed(_SEED)
        outputs = run.run(*arguments)
    results = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)][-captured.result_count :]
    values = dict(run.values)
    ends = [t for t in results if t.requires_grad]
    inner = {name: t for name, t in run.values.items() if t.requires_grad}
    if ends and inner:
        gradients = torch.autograd.grad(ends, list(inner.values()), _cotangents(ends), allow_unused=True)
        values |= {f"grad_{name}": g for name, g in zip(inner, gradients, strict=True) if g is not None}
    return {name: t.detach() for name, t in values.items()}


class _Recorder(torch.fx.Interpreter):
    """Runs a graph and keeps the result of each node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, torch.Tensor] = {}

    def run_node(self, node: torch.fx.Node) -> Any:
        """Run a node and record its first result; further results of a fused operator may differ in meaning."""
        result = super().run_node(node)
        first = result[0] if isinstance(result, tuple | list) and result else result
        if node.op == "call_function" and isinstance(first, torch.Tensor):
            self.values[node.name] = first
        return result


def _values_of_graph(
    captured: Captured, inputs: Sequence[torch.Tensor], wrt: Sequence[bool], eager: Mapping[str, torch.Tensor]
) -> tuple[list[ir.Node], dict[str, torch.Tensor]]:
    """Return the nodes of the optimized joint graph, and its values."""
    model = traversal.with_graph(captured.model, traversal.clone(captured.model.graph)[0])
    results = captured.result_count
    is_result = [i < results for i in range(len(model.graph.outputs))]
    tensors = list(inputs)
    if any(wrt):
        joint = differentiate(model, wrt, is_result)
        optimize(joint.model, JOINT)
        model = joint.model
        shapes = [eager.get(str(v.name)) for v in list(model.graph.outputs)[:results]]
        ends = [
            t for t, cotangent in zip(shapes, joint.cotangents, strict=False) if cotangent is not None and t is not None
        ]
        tensors += _cotangents(ends)
    graph = model.graph
    nodes = list(graph)
    graph.outputs.clear()
    graph.outputs.extend(
        v for node in nodes for v in node.outputs if v.name and v.dtype is not None and is_float(v.dtype)
    )
    names = [str(v.name) for v in graph.outputs]
    program = Program(single_part(model), "verify", common_device(tensors))
    with torch.no_grad(), torch.random.fork_rng([t.device.index or 0 for t in inputs if t.is_cuda]):
        torch.manual_seed(_SEED)
        values, _ = program.run([t.detach() for t in tensors], ())
    return nodes, {name: t for name, t in zip(names, values, strict=True) if t is not None}
