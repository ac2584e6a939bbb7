"""Axis maps: which output axis comes from which input axis, in the notation of JAX's sharding rules.

    "... m k, ... k n -> ... m n"       MatMul: m and n pass through, k is contracted
    "..., ... -> ..."                   elementwise, with broadcasting
    "b s h, h -> b s h"                 a norm's affine part
    "(b s) h -> b s h"                  a reshape: the first input axis is b times s

Commas separate inputs and outputs; `-` is an absent optional input. Axes with the same name correspond: slicing that
axis of every input slices the output in the same way. An axis in brackets, `[h]`, cannot be sliced: each output element
depends on all of it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

Factor = tuple[str, ...]


@dataclass(frozen=True)
class Operand:
    """One input or output of an axis map.

    Attributes:
        factors: the factors of each written axis.
        unsliceable: names of the axes in brackets.
        ellipsis: the position of `...` among the axes, or None.
    """

    factors: tuple[Factor, ...]
    unsliceable: frozenset[str]
    ellipsis: int | None

    def axis_factors(self, rank: int) -> tuple[Factor, ...]:
        """Return the factors of each of `rank` axes; those under `...` are named from the right: `...1` is the last."""
        if self.ellipsis is None:
            return self.factors
        hidden = rank - len(self.factors)
        middle = tuple((f"...{hidden - i}",) for i in range(hidden))
        return self.factors[: self.ellipsis] + middle + self.factors[self.ellipsis :]


@dataclass(frozen=True)
class AxisMap:
    """The axes of all inputs and outputs of a node."""

    inputs: tuple[Operand | None, ...]
    outputs: tuple[Operand | None, ...]

    def sources(
        self, axis: int, ranks: list[int | None], out_ranks: list[int], output: int = 0
    ) -> list[int | None] | None:
        """Return, for each input, the axis that output axis `axis` comes from; None for an input without it.

        Return None altogether if the axis cannot be sliced, is a product of several axes, or comes from no input.
        """
        target = self.outputs[output]
        if target is None:
            return None
        factors = target.axis_factors(out_ranks[output])[axis]
        if len(factors) != 1:
            return None
        name = factors[0]
        if not name or name in target.unsliceable:
            return None
        source_axes: list[int | None] = []
        for operand, rank in zip(self.inputs, ranks, strict=True):
            if operand is None or rank is None:
                source_axes.append(None)
                continue
            operand_factors = operand.axis_factors(rank)
            matches = [i for i, f in enumerate(operand_factors) if name in f]
            if name in operand.unsliceable or any(len(operand_factors[i]) != 1 for i in matches) or len(matches) > 1:
                return None
            source_axes.append(matches[0] if matches else None)
        return source_axes if any(source is not None for source in source_axes) else None


NO_AXES = ""


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> AxisMap | None:
    """Parse an axis map; None for NO_AXES: no axis passes through."""
    if not text:
        return None
    left, right = text.split("->")
    return AxisMap(tuple(map(_operand, left.split(","))), tuple(map(_operand, right.split(","))))


def _operand(text: str) -> Operand | None:
    text = text.strip()
    if text == "-":
        return None
    factors: list[Factor] = []
    unsliceable: set[str] = set()
    ellipsis: int | None = None
    for word in re.findall(r"\([^)]*\)|\[[^\]]*\]|\S+", text):
        if word == "...":
            ellipsis = len(factors)
        elif word == "1":
            factors.append(())
        elif word[0] == "(":
            factors.append(tuple(word[1:-1].split()))
        else:
            name = word.strip("[]")
            if word[0] == "[":
                unsliceable.add(name)
            factors.append((name,))
    return Operand(tuple(factors), frozenset(unsliceable), ellipsis)
