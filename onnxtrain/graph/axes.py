"""Which output axis comes from which input axis: an op's axis map, in the style of JAX's sharding rules.

    "... m k, ... k n -> ... m n"       MatMul: m and n pass through, k is contracted
    "..., ... -> ..."                   elementwise, with broadcasting
    "b s h, h -> b s h"                 a norm's affine part
    "(b s) h -> b s h"                  a reshape: the first input axis is b times s

Inputs and outputs are separated by commas; an absent optional input is written `-`. Two axes with one name are the
same axis: taking rows of it in every input takes the same rows of the output. An axis whose name stands in brackets
`[h]` is read whole: no part of an output can be computed from a part of it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

Factor = tuple[str, ...]


@dataclass(frozen=True)
class Operand:
    """Factors of each axis; `ellipsis` is where `...` stands, or None."""

    factors: tuple[Factor, ...]
    whole: frozenset[str]
    ellipsis: int | None

    def named(self, rank: int) -> tuple[Factor, ...]:
        """The factors of each of `rank` axes; axes under `...` are named from the right: `...1` is the last."""
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
        """For each input, the axis that output axis `axis` comes from (None where it has none).

        None where the op needs the axis whole, or where the axis is made of several.
        """
        target = self.outputs[output]
        if target is None:
            return None
        factors = target.named(out_ranks[output])[axis]
        if len(factors) != 1:
            return None
        name = factors[0]
        if not name or name in target.whole:
            return None
        found: list[int | None] = []
        for operand, rank in zip(self.inputs, ranks, strict=True):
            if operand is None or rank is None:
                found.append(None)
                continue
            places = [i for i, f in enumerate(operand.named(rank)) if name in f]
            if name in operand.whole or any(len(operand.named(rank)[i]) != 1 for i in places) or len(places) > 1:
                return None
            found.append(places[0] if places else None)
        return found if any(place is not None for place in found) else None


NO_AXES = ""


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> AxisMap | None:
    """The axis map that `text` writes down; None for NO_AXES: nothing passes through."""
    if not text:
        return None
    left, right = text.split("->")
    return AxisMap(tuple(map(_operand, left.split(","))), tuple(map(_operand, right.split(","))))


def _operand(text: str) -> Operand | None:
    text = text.strip()
    if text == "-":
        return None
    factors: list[Factor] = []
    whole: set[str] = set()
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
                whole.add(name)
            factors.append((name,))
    return Operand(tuple(factors), frozenset(whole), ellipsis)
