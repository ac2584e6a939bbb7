"""Decompose composite operators that have no definition, as PyTorch decomposes them.

    cosine_embedding_loss(a, b, y)  ──>  mul, sum, rsub, sqrt, where, …        each with its own definition and gradient

A composite operator (CompositeImplicitAutograd) has no derivative of its own: eager PyTorch differentiates its
decomposition, and so does the graph. An operator whose decomposition specializes on a size (an LSTM's loop over time
steps) is kept.
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
from onnxtrain.capture.functionalize.autocast import (
    composites_with_casts,
    declare_autocast_dtypes,
    hidden_casts,
    with_autocast_inside,
)
from onnxtrain.capture.functionalize.views import is_undeclared_view
from onnxtrain.ops import FROM_TORCH
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

DecompositionTable = dict[Any, Callable[..., Any]]


# torch 2.11 drops checks of linear algebra as dead code: the inverse of a singular matrix was silently NaN.
for _name in ("_assert_async", "_linalg_check_errors"):
    has_side_effect(getattr(torch.ops.aten, _name).default)


def composite_decompositions(program: ExportedProgram) -> DecompositionTable:
    """Return the decomposition table of `program`, with every composite operator to decompose.

    Results of operators that are kept are cast in `program` to the dtypes that they have under autocast.
    """
    kept: set[Any] = set()
    called: set[Any] = set()
    for node in _calls(program.graph_module):
        if not _is_undefined_composite(node.target):
            continue
        called.add(node.target)
        if not _decomposes_at_all_sizes(node):
            kept.add(node.target)
    builtin = {op for op in all_composites() if _is_undefined_composite(op)}
    with_casts = composites_with_casts(program)
    called |= {n.target for n in _calls(program.graph_module) if _is_undeclared_view(n)} - kept
    kept |= set(filter(_samples, with_casts))
    declare_autocast_dtypes(program, kept & with_casts)
    decomposed = (builtin | called | with_casts) - kept
    return {op: with_autocast_inside(op, decomposition_of_composite(op)) for op in decomposed}


def nested_cast_decompositions(functional: ExportedProgram) -> DecompositionTable:
    """Return the decomposition table of the operators that decomposed operators call and inside which autocast casts.

        cross_entropy_loss(bfloat16)  ──>  _log_softmax(bfloat16), nll_loss_nd      ──>  _to_copy(float32), nll_loss

    CUDA's autocast casts inside nll_loss_nd, which is not a node of the export.

    Args:
        functional: the program, with its composite operators decomposed.
    """
    casting = (op for op in hidden_casts(functional, FROM_TORCH) if not _samples(op))
    return {op: with_autocast_inside(op, decomposition_of_composite(op)) for op in casting}


def _is_undeclared_view(node: torch.fx.Node) -> bool:
    target: Any = node.target
    return is_undeclared_view(node) and is_preservable_composite(target) and not _samples(target)


@contextmanager
def keep_buffer_copies() -> Iterator[None]:
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
        and not _samples(target)
        and any("Tensor" in str(result.type) for result in schema_of(target).returns)
        and is_preservable_composite(target)
    )


def _samples(target: OpOverload) -> bool:
    """Return whether an operator samples.

    Its decomposition on fake tensors may differ (that of an LSTM loses its dropout).
    """
    return torch.Tag.nondeterministic_seeded in target.tags


def _decomposes_at_all_sizes(node: torch.fx.Node) -> bool:
    """Return whether the decomposition of a call is valid at all sizes at which the call itself is."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    values = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    if mode is None:
        return False
    try:
        with reports_dropped(), mode, enable_python_dispatcher(), record_size_guards(mode.shape_env) as guards:
            node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]
    except Exception:  # noqa: BLE001  # an operator may raise anything on fake tensors
        return False
    return not any(map(specializes_size, guards))


@contextmanager
def record_size_guards(env: ShapeEnv | None) -> Iterator[list[Any]]:
    """Record the conditions on sizes that are evaluated in this context and not statically known; `env` keeps none.

    A condition with a fallback value that holds for all sizes (`guard_or_false`, as in the check for contiguity) counts
    only if it evaluates to another value.
    """
    guards: list[Any] = []
    if env is None:
        yield guards
        return
    original = env.evaluate_expr

    def evaluate(expr: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(expr, *args, **kwargs)
        fallback = kwargs.get("fallback_value")
        if fallback is not None and bool(value) == fallback:
            return value
        if getattr(expr, "free_symbols", None) and static_value(env, expr) is None:
            condition = {sympy.true: expr, sympy.false: sympy.Not(expr)}
            guards.append(condition.get(value, sympy.Eq(expr, value, evaluate=False)))
        return value

    env.evaluate_expr = evaluate  # type: ignore[method-assign,assignment]  # of this environment, for this block
    try:
        with env.suppress_guards(), env.ignore_fresh_unbacked_symbols():
            yield guards
    finally:
        del env.evaluate_expr


def specializes_size(condition: Any) -> bool:
    """Return whether a condition fixes a size; inequalities only select between equivalent implementations."""
    return isinstance(condition, sympy.Eq)
