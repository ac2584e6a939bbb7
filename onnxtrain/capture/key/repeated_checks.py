"""Check modules of one kind in a loop, instead of by statements for each: fewer statements to compile.

if c1.__class__ is not c2: return None              for c_0, c_1 in c5:
t1 = c1.__dict__["_parameters"]["weight"]               if c_0.__class__ is not c_1: return None
if c3.__class__ is not c4: return None        ──>       ts0.append(c_0.__dict__["_parameters"]["weight"])
t2 = c3.__dict__["_parameters"]["weight"]           t1, t2, = ts0
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_MIN_REPEATS = 3
# A literal, whose contents are no names, or the name of a constant or a tensor; not an attribute of such a name.
_NAME = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![.\w])([ct]\d+)\b""")
_ASSIGNMENT = re.compile(r"^t_\d+ = (.*)$", re.MULTILINE)


def with_loops(modules: Sequence[Sequence[str]], values: Mapping[str, Any], bind: Callable[[object], str]) -> list[str]:
    """Return statements that do what those of all modules do, in another order.

    Args:
        modules: the statements of each module. They read the constants c1, c2, …, and assign tensors to t1, t2, …
        values: the values of the constants.
        bind: binds a value to the name of a new constant.
    """
    kinds: dict[str, list[tuple[Sequence[str], list[str]]]] = {}
    for statements in modules:
        text, names = _renamed("\n".join(statements))
        kinds.setdefault(text, []).append((statements, names))
    loops: list[str] = []
    others: list[str] = []
    for number, (text, alike) in enumerate(kinds.items()):
        if len(alike) >= _MIN_REPEATS and _has_only_own_tensors(text, alike[0][1]):
            loops += _loop(text, [names for _, names in alike], values, bind, f"ts{number}")
        else:
            others += (line for statements, _ in alike for line in statements)
    return loops + others  # the others may compare tensors with those that the loops assign


def _renamed(text: str) -> tuple[str, list[str]]:
    """Number the names in order of occurrence; return the text and the names that it had."""
    new_names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        name = match[1]
        return match[0] if name is None else new_names.setdefault(name, f"{name[0]}_{len(new_names)}")

    return _NAME.sub(rename, text), list(new_names)


def _has_only_own_tensors(text: str, names: Sequence[str]) -> bool:
    """Return whether the statements assign each tensor that they name, and do not read it."""
    tensors = sum(name[0] == "t" for name in names)
    occurrences = len(re.findall(r"(?<![.\w'\"])t_\d+\b", text))
    return len(_ASSIGNMENT.findall(text)) == tensors == occurrences


def _loop(
    text: str,
    names_of_each: Sequence[Sequence[str]],
    values: Mapping[str, Any],
    bind: Callable[[object], str],
    tensors: str,
) -> list[str]:
    """Return a loop that runs `text` with the constants and tensors of each module."""
    constants = [f"c_{index}" for index, name in enumerate(names_of_each[0]) if name[0] == "c"]
    rows = bind(tuple(tuple(values[name] for name in names if name[0] == "c") for names in names_of_each))
    body = _ASSIGNMENT.sub(rf"{tensors}.append(\1)", text).split("\n")
    loop = [f"for {', '.join(constants)}, in {rows}:", *(f"    {line}" for line in body)]
    assigned = [name for names in names_of_each for name in names if name[0] == "t"]
    return [f"{tensors} = []", *loop, f"{', '.join(assigned)}, = {tensors}"] if assigned else loop
