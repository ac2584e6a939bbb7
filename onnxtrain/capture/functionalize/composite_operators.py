"""Decompose composite operators that have no definition, as PyTorch decomposes them.

    cosine_embedding_loss(a, b, y)  ──>  mul, sum, rsub, sqrt, where, …        each with its own definition and gradient

A composite operator (CompositeImplicitAutograd) has no derivative of its own: eager PyTorch differentiates its
decomposition, and so does the graph. An operator whose decomposition fixes a size (an LSTM's loop over time steps) is
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch.export.exported_program import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import has_side_effect

from onnxtrain.capture.export.torch_reports import reports_dropped
from onnxtrain.capture.functionalize.autocast import casting, casting_composites, hidden_casts, state_types
from onnxtrain.capture.functionalize.views import is_unmarked_view
from onnxtrain.ops import FROM_TORCH
from onnxtrain.ops.unsupported import CHECKS
from onnxtrain.torch_compat import pytree
from onnxtrain.torch_compat.decompositions import (
    all_composites,
    decomposition_of_composite,
    enable_python_dispatcher,
    is_preservable_composite,
)
from onnxtrain.torch_compat.operators import OpOverload, schema_of
from onnxtrain.torch_compat.patch_points import BUFFER_COPIES
from onnxtrain.torch_compat.symbols import static_value

Parts = dict[Any, Callable[..., Any]]  # operator to the function that calls its parts


# torch 2.11 drops checks of linear algebra as dead code: the inverse of a singular matrix was silently NaN.
for _name in CHECKS:
    has_side_effect(getattr(torch.ops.aten, _name).default)


def composite_parts(program: ExportedProgram) -> Parts:
    """The decomposition table of `program`: every composite operator to decompose."""
    whole: set[Any] = set()
    custom: set[Any] = set()
    for node in _calls(program.graph_module):
        if not _is_undefined_composite(node.target):
            continue
        custom.add(node.target)
        if not _comes_apart(node):
            whole.add(node.target)
    known = {op for op in all_composites() if _is_undefined_composite(op)}
    cast = casting_composites(program)
    custom |= {n.target for n in _calls(program.graph_module) if _is_unmarked_view(n)} - whole
    whole |= set(filter(_draws, cast))
    state_types(program, whole & cast)
    return {op: casting(op, decomposition_of_composite(op)) for op in (known | custom | cast) - whole}


def nested_cast_parts(functional: ExportedProgram) -> Parts:
    """The decomposition table of a program whose composite operators were decomposed: what they call and cast inside.

        cross_entropy_loss(bfloat16)  ──>  _log_softmax(bfloat16), nll_loss_nd      ──>  _to_copy(float32), nll_loss

    CUDA's autocast casts inside nll_loss_nd, which is no node of the export.
    """
    return {op: casting(op, decomposition_of_composite(op)) for op in hidden_casts(functional, FROM_TORCH)}


def _is_unmarked_view(node: torch.fx.Node) -> bool:
    target: Any = node.target
    return is_unmarked_view(node) and is_preservable_composite(target) and not _draws(target)


@contextmanager
def buffer_copies_kept() -> Iterator[None]:
    """Keep `buffer.copy_(x)` a copy: torch.export replaces the buffer by x, whatever the shape and dtype of x."""
    with BUFFER_COPIES.replaced_in_thread(lambda *pair: pair):
        yield


def _calls(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.op == "call_function")


def _is_undefined_composite(target: Any) -> bool:
    return (
        isinstance(target, OpOverload)
        and str(target) not in FROM_TORCH
        and not _draws(target)
        and any("Tensor" in str(result.type) for result in schema_of(target).returns)
        and is_preservable_composite(target)
    )


def _draws(target: OpOverload) -> bool:
    """Whether an operator samples: its decomposition on fake tensors may differ (that of an LSTM loses its dropout)."""
    return torch.Tag.nondeterministic_seeded in target.tags


def _comes_apart(node: torch.fx.Node) -> bool:
    """Whether the decomposition of a call runs at all sizes at which the call itself runs."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if mode is None:
        return False
    try:
        with reports_dropped(), mode, enable_python_dispatcher(), size_decisions(mode.shape_env) as made:
            node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001  # a part that cannot run on fake tensors raises anything
        return False
    return not any(map(fixes_size, made))


@contextmanager
def size_decisions(env: ShapeEnv | None) -> Iterator[list[Any]]:
    """Collect the conditions on sizes that are evaluated inside and do not follow from known ones.

    A condition with a fallback for all sizes (`guard_or_false`, as in the question whether a tensor is contiguous) does
    not count if it evaluates to the fallback. `env` itself stays as it was.
    """
    made: list[Any] = []
    if env is None:
        yield made
        return
    evaluate = env.evaluate_expr

    def noting(expr: Any, *args: Any, **kwargs: Any) -> Any:
        value = evaluate(expr, *args, **kwargs)
        for_all = kwargs.get("fallback_value")
        if for_all is not None and bool(value) == for_all:
            return value
        if getattr(expr, "free_symbols", None) and static_value(env, expr) is None:
            truth = {sympy.true: expr, sympy.false: sympy.Not(expr)}
            made.append(truth.get(value, sympy.Eq(expr, value, evaluate=False)))
        return value

    env.evaluate_expr = noting  # type: ignore[method-assign,assignment]  # of this environment, for this block
    try:
        with env.suppress_guards(), env.ignore_fresh_unbacked_symbols():
            yield made
    finally:
        del env.evaluate_expr


def fixes_size(condition: Any) -> bool:
    """Whether a condition fixes a size, other than one by which PyTorch selects between equivalent implementations."""
    return isinstance(condition, sympy.Eq)
