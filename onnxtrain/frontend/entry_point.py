"""How the entry points (ORTModule, prepare, the backend of torch.compile, commands) want their modules run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onnxtrain.execute.compiled import Compiled
from onnxtrain.execute.cuda_recorder import Recorders

Call: TypeAlias = Callable[..., Any]


def _always_capture() -> None:
    return None


@dataclass(frozen=True)
class EntryPoint:
    """How an entry point wants its module run.

    Attributes:
        in_torch: runs the module in eager PyTorch; set if the module's own hooks run around the graph, else None.
        fixed_sizes: indices of the call's tensors whose sizes never change.
        pieces: turns a function into one that runs as graphs between graph breaks; None: no graph breaks.
        is_part: whether the module is only part of the user's model, so that its first graph is one of several.
        is_piece: whether the module is a piece between graph breaks: the user was warned, so failures are only logged.
        twins: units of other modules that can be reused if the graph is the same, by their other dependencies.
        recorders: records CUDA graphs of this module and of others of the user's model.
        omits_blocks: whether graphs may lack repeated blocks until they are planned.
        instead_of_capture: called before a capture; returns another way to run the call, if there is a better one now.
    """

    in_torch: Call | None = None
    fixed_sizes: frozenset[int] = frozenset()
    pieces: Callable[[Call], Call] | None = None
    is_part: bool = False
    is_piece: bool = False
    twins: dict[Any, list[Compiled]] = field(default_factory=dict)
    recorders: Recorders = field(default_factory=Recorders)
    omits_blocks: bool = True
    instead_of_capture: Callable[[], Call | None] = _always_capture
