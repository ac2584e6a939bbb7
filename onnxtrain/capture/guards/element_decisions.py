"""What Python decides from elements of forward's arguments: `if mask.all():`, `if flag:`.

A graph has no branches, so it holds for the calls in which forward decides alike. A decision is captured as a graph of
its own, from the arguments to the tensor that Python tests, and that graph is a guard of the module's. Forward is
traced up to the first decision that is not answered yet; the answer for the call is computed; then it is traced again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.exported_program import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.experimental import proxy_tensor

from onnxtrain.capture import source_line
from onnxtrain.errors import CaptureError
from onnxtrain.torch_compat.fake_tensors import FakeTensor
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.patch_points import TENSOR_BOOL

_MOST_DECISIONS = 16
_MOST_NODES = 32  # the guard runs on every call
_TEST = torch.Tensor.__bool__


@dataclass(frozen=True)
class ElementDecision:
    """Whether the tensor that `graph` computes from the arguments is true.

    Attributes:
        graph: takes what `lifted` gives, then the flat inputs of a call; None in the place of what it does not read.
        lifted: constants of the graph.
        answer: what forward was told.
        where: the line that tests the tensor.
    """

    graph: torch.fx.GraphModule
    lifted: tuple[Any, ...]
    answer: bool
    where: str

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether forward decides alike for these inputs."""
        return _truth(self.graph, self.lifted, tensors) == self.answer


class UndecidedError(BaseException):
    """Forward tests a tensor whose elements are not known yet. No Exception: users' handlers are for theirs."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor


class ElementDecisions:
    """The decisions of one forward, in their order.

    Args:
        tensors: the call's.

    Attributes:
        made: those that are answered.
        is_open: whether forward stopped at one that is not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.made: list[ElementDecision] = []
        self.is_open = False
        self._tensors = tensors
        self._next = 0
        self._where = ""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Answers what forward asks while this is held.

        Raises:
            UndecidedError: an answer is not known yet.
        """
        self._next, self.is_open = 0, False
        tracer = proxy_tensor.get_proxy_mode()
        stack = getattr(getattr(tracer, "tracer", None), "module_stack", {})
        depth = len(stack)
        try:
            with TENSOR_BOOL.replaced_in_thread(self._answer):
                yield
        except UndecidedError:
            while len(stack) > depth:  # the tracer pops a submodule only where it returns
                stack.popitem()
            raise

    def _answer(self, tensor: torch.Tensor) -> bool:
        """What `bool(tensor)` is."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or tensor.shape.numel() != 1:
            return bool(_TEST(tensor))
        if self._next == len(self.made):
            self.is_open, self._where = True, source_line.of_caller() or ""
            raise UndecidedError(tensor)
        self._next += 1
        return self.made[self._next - 1].answer

    def settle(self, program: ExportedProgram) -> None:
        """Answers the open decision, whose tensor is what `program` gives.

        Raises:
            CaptureError: it does not follow from the arguments alone, or by too much work.
        """
        graph, lifted = _guard(program, self._where, len(self.made))
        self.made.append(ElementDecision(graph, lifted, _truth(graph, lifted, self._tensors), self._where))


def _truth(graph: torch.fx.GraphModule, lifted: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    with torch.no_grad():
        (tensor,) = graph(*lifted, *tensors)
        return bool(tensor)


def _guard(program: ExportedProgram, where: str, made: int) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    graph = program.graph_module
    graph.graph.eliminate_dead_code()
    graph.recompile()
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    lifted: list[Any] = []
    own = False
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.CONSTANT_TENSOR:
            lifted.append(program.constants[str(spec.target)])
        elif spec.kind != InputKind.USER_INPUT:
            lifted.append(None)
            own = own or bool(node.users)
    if got := _obstacle(calls, made, reads_parameters=own):
        raise CaptureError(
            "forward decides in Python by the elements of a tensor (data-dependent control flow)",
            where=where,
            expected=f"at most {_MOST_DECISIONS} decisions, from arguments, each in at most {_MOST_NODES} operations",
            got=got,
            todo="the module runs in PyTorch; decide by a Python argument, or compute both with torch.where",
        )
    return graph, tuple(lifted)


def _obstacle(calls: Sequence[torch.fx.Node], made: int, *, reads_parameters: bool) -> str:
    """Why a decision cannot be a guard; "" if it can."""
    if reads_parameters:
        return "a decision that follows from the module's parameters or buffers"
    if made == _MOST_DECISIONS:
        return f"more than {_MOST_DECISIONS} decisions"
    if len(calls) > _MOST_NODES:
        return f"a decision that takes {len(calls)} operations"
    impure = next((node.target for node in calls if not _is_pure(node)), None)
    if impure is None:
        return ""
    is_random = isinstance(impure, OpOverload) and torch.Tag.nondeterministic_seeded in impure.tags
    return f"a decision by {impure}, which {'samples random numbers' if is_random else 'changes a tensor in place'}"


def _is_pure(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return getattr(target, "__module__", "") in ("_operator", "operator", "math", "torch")
    written = [a for a, s in zip(node.args, schema_of(target).arguments, strict=False) if s.is_write]
    return torch.Tag.nondeterministic_seeded not in target.tags and all(map(_is_own, written))


def _is_own(written: Any) -> bool:
    """Whether a tensor that is changed in place was made on the way, and is no view of another."""
    if not isinstance(written, torch.fx.Node) or not isinstance(written.target, OpOverload):
        return False
    schema = schema_of(written.target)
    if schema.is_mutable:
        return all(_is_own(a) for a, s in zip(written.args, schema.arguments, strict=False) if s.is_write)
    return not any(result.alias_info for result in schema.returns)
