"""Python control flow that depends on tensor values of the arguments: `if mask.all():`, `if flag.item():`.

A graph has no branches, so it is valid for the calls in which forward takes the same branches. The condition of each
branch is captured as a small graph from the arguments to the tensor that Python tests, and that graph becomes a guard.
Forward is traced up to the first condition without an answer; its value in this call is computed; forward is traced
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental import proxy_tensor

from onnxtrain.capture import source_location
from onnxtrain.capture.guards.sample_ranges import certain_answer
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.node import TORCH_OP
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.patch_points import TENSOR_BOOL, TENSOR_ITEM

_MAX_DECISIONS = 16
_MAX_NODES = 64  # per decision, because the guard runs on every call; Longformer's take 45
_TENSOR_BOOL = torch.Tensor.__bool__


@dataclass(frozen=True)
class ElementDecision:
    """The truth value of the tensor that `graph` computes from the arguments.

    Attributes:
        graph: takes `lifted`, then the flat inputs of a call.
        lifted: constants of the graph; None for a parameter or buffer, which it does not read.
        answer: the truth value that forward got during the capture.
        where: the source location of the test.
    """

    graph: torch.fx.GraphModule
    lifted: tuple[Any, ...]
    answer: bool
    where: str

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether forward takes the same branch for these inputs."""
        return _truth(self.graph, self.lifted, tensors) == self.answer


class UndecidedError(BaseException):
    """Forward tests a tensor without an answer. Not an Exception, so that no handler in forward catches it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class ElementDecisions:
    """The decisions of one forward, in execution order.

    Args:
        tensors: the call's tensors.

    Attributes:
        answered: the decisions with an answer.
        is_undecided: whether the last trace stopped at a decision without one.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.answered: list[ElementDecision] = []
        self.is_undecided = False
        self._tensors = tensors
        self._next = 0
        self._where = ""

    @property
    def count(self) -> int:
        """The number of tests in the current trace."""
        return self._next

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer the tensor tests of forward while this is held.

        Raises:
            UndecidedError: a test has no answer yet.
        """
        self._next, self.is_undecided = 0, False
        tracer = proxy_tensor.get_proxy_mode()
        stack = getattr(getattr(tracer, "tracer", None), "module_stack", {})
        depth = len(stack)
        try:
            with (
                TENSOR_BOOL.replaced_in_thread(self._answer),
                TENSOR_ITEM.replaced_in_thread(partial(self._item, TENSOR_ITEM.original)),
            ):
                yield
        except UndecidedError:
            while len(stack) > depth:  # the tracer pops a submodule only when it returns
                stack.popitem()
            raise

    def _item(self, original: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        """Replace `tensor.item()`: forward gets a truth value as from `bool(tensor)`."""
        is_truth_value = isinstance(tensor, FakeTensor) and tensor.dtype == torch.bool
        return self._answer(tensor) if is_truth_value else original(tensor)

    def _answer(self, tensor: torch.Tensor) -> bool:
        """Replace `bool(tensor)`."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.shape.numel() != 1:
            return bool(_TENSOR_BOOL(tensor))
        certain = certain_answer(tensor)
        if certain is not None:
            return certain
        if self._next == len(self.answered):
            self.is_undecided, self._where = True, source_location.of_caller() or ""
            raise UndecidedError(tensor)
        self._next += 1
        return self.answered[self._next - 1].answer

    def decide(self, program: ExportedProgram) -> None:
        """Answer the decision at which the trace stopped, with the value of the tensor that `program` returns.

        Raises:
            CaptureError: the tensor depends on more than the arguments, or takes too many operators to compute.
        """
        graph, lifted = _guard(program, self._where, len(self.answered))
        self.answered.append(ElementDecision(graph, lifted, _truth(graph, lifted, self._tensors), self._where))


def _truth(graph: torch.fx.GraphModule, lifted: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    with torch.no_grad():
        (tensor,) = graph(*lifted, *tensors)
        return bool(tensor)


def _guard(program: ExportedProgram, where: str, answered: int) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    graph = program.graph_module
    for node in reversed(graph.graph.nodes):
        if not node.users and _is_dead(node):
            graph.graph.erase_node(node)
    graph.recompile()
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    lifted: list[Any] = []
    reads_parameters = False
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.CONSTANT_TENSOR:
            lifted.append(program.constants[str(spec.target)])
        elif spec.kind != InputKind.USER_INPUT:
            lifted.append(None)
            reads_parameters = reads_parameters or bool(node.users)
    if obstacle := _obstacle(calls, answered, reads_parameters=reads_parameters):
        raise CaptureError(
            "forward branches in Python on tensor values (data-dependent control flow)",
            where=where,
            expected=f"at most {_MAX_DECISIONS} branches, on values that {_MAX_NODES} operators compute from inputs",
            got=obstacle,
            todo="the module runs in PyTorch; branch on a Python argument, or use torch.where",
        )
    return graph, tuple(lifted)


def _is_dead(node: torch.fx.Node) -> bool:
    """Return whether a node without users can be removed, such as a dropout or an assertion before the decision."""
    if node.op != "call_function":
        return False
    return not schema_of(node.target).is_mutable if isinstance(node.target, OpOverload) else not node.is_impure()


def _obstacle(calls: Sequence[torch.fx.Node], answered: int, *, reads_parameters: bool) -> str:
    """Say why a decision cannot become a guard; "" if it can."""
    if reads_parameters:
        return "a decision that depends on the module's parameters or buffers"
    if answered == _MAX_DECISIONS:
        return f"more than {_MAX_DECISIONS} decisions"
    operators = sum(isinstance(node.meta.get("val"), torch.Tensor) for node in calls)  # without arithmetic of sizes
    if operators > _MAX_NODES:
        return f"a decision that takes {operators} operators"
    impure = next((node.target for node in calls if not _is_pure(node)), None)
    if impure is None:
        return ""
    if impure is TORCH_OP:
        return f"a decision by {impure}, which runs the user's Python"
    is_random = isinstance(impure, OpOverload) and torch.Tag.nondeterministic_seeded in impure.tags
    return f"a decision by {impure}, which {'samples random numbers' if is_random else 'changes a tensor in place'}"


def _is_pure(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if target is TORCH_OP:
        return False
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    written = [a for a, s in zip(node.args, schema_of(target).arguments, strict=False) if s.is_write]
    return torch.Tag.nondeterministic_seeded not in target.tags and all(map(_is_temporary, written))


def _is_temporary(written: Any) -> bool:
    """Return whether a tensor that is changed in place, or of which it is a view, was allocated inside the graph."""
    if not isinstance(written, torch.fx.Node) or not isinstance(written.target, OpOverload):
        return False
    schema = schema_of(written.target)
    aliased = [a for a, s in zip(written.args, schema.arguments, strict=False) if s.is_write or s.alias_info]
    return all(map(_is_temporary, aliased)) if aliased else not any(r.alias_info for r in schema.returns)
