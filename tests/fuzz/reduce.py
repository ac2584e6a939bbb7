"""Shrink a failing program: delete statements, replace results by inputs, simplify sizes and the configuration."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.fuzz.programs import Program, Statement, Tensor, cleaned
from tests.fuzz.worker import Case

Judge = Callable[[Case], Case]


def reduced(case: Case, judge: Judge, seconds: float) -> Case:
    """The smallest case with the same signature that is found within the time."""
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in _simpler(case):
            if time.monotonic() > deadline:
                return case
            judged = judge(candidate)
            if judged.verdict.signature == case.verdict.signature:
                case, smaller = judged, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Simpler cases, those with the largest reduction first."""
    program, configuration = case.program, case.configuration
    for simpler in configuration.simpler():
        yield replace(case, configuration=simpler)
    for changed in _fewer_outputs(program):
        yield replace(case, program=changed)
    unread = _without_unread(program)
    if unread != program:
        yield replace(case, program=unread)
    for changed in _fewer_statements(program):
        yield replace(case, program=changed)
    for changed in _fewer_sizes(program):
        yield replace(case, program=changed)


def _fewer_outputs(program: Program) -> Iterator[Program]:
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield replace(program, outputs=(name,))
        for name in program.outputs:
            yield replace(program, outputs=tuple(n for n in program.outputs if n != name))
    if program.structure != "one" and len(program.outputs) == 1:
        yield replace(program, structure="one")


def _without_unread(program: Program) -> Program:
    """The program without statements, inputs and parameters that no output needs; mutations are kept."""
    needed = set(program.outputs)
    statements: list[Statement] = []
    for statement in reversed(program.statements):
        if not statement.targets or needed.intersection(statement.targets):
            needed |= statement.names
            statements.append(statement)
    inputs = tuple(t for t in program.inputs if t.name in needed) or program.inputs[:1]
    return cleaned(replace(program, statements=tuple(reversed(statements)), inputs=inputs))


def _fewer_statements(program: Program) -> Iterator[Program]:
    for index in reversed(range(len(program.statements))):
        rest = (*program.statements[:index], *program.statements[index + 1 :])
        statement = program.statements[index]
        without = replace(program, statements=rest)
        if not statement.targets:
            yield cleaned(without)
            continue
        names = [n for n in statement.names if n in program.types and n not in statement.targets]
        if not any(set(statement.targets) & s.names for s in rest) and not set(statement.targets) & set(
            program.outputs
        ):
            yield cleaned(without)
            continue
        for target in statement.targets[:1]:
            alike = [n for n in names if program.types[n] == program.types.get(target)]
            for name in (*alike, *(n for n in names if n not in alike)):
                if len(statement.targets) == 1:
                    yield cleaned(_renamed(without, target, name))
        yield from _as_inputs(without, statement)


def _as_inputs(program: Program, statement: Statement) -> Iterator[Program]:
    """Replace the results of a statement by inputs."""
    inputs = list(program.inputs)
    for target in statement.targets:
        shapes, dtype = program.types[target]
        number = max((t.number for t in inputs), default=-1) + 1
        fill = {torch.int64: "integers(seed, 3, *shape)", torch.bool: "normal(seed, *shape) > 0"}.get(
            dtype, "normal(seed, *shape)"
        )
        if not dtype.is_floating_point and dtype not in (torch.int64, torch.bool):
            return
        dtype_name = str(dtype).removeprefix("torch.")
        wide = len(shapes) if program.batches > 1 else 1
        for trained in (False,) if not dtype.is_floating_point else (False, True):
            tensor = Tensor(
                f"x{number}", shapes[:wide], fill, trained, dtype_name if dtype.is_floating_point else "float32"
            )
            changed = replace(program, inputs=(*inputs, tensor), types={**program.types, tensor.name: (shapes, dtype)})
            if len(statement.targets) == 1:
                yield cleaned(_renamed(changed, target, tensor.name))
        inputs.append(tensor)
        program = _renamed(replace(program, types={**program.types, tensor.name: (shapes, dtype)}), target, tensor.name)
    if len(statement.targets) > 1:
        yield cleaned(replace(program, inputs=tuple(inputs)))


def _renamed(program: Program, old: str, new: str) -> Program:
    pattern = re.compile(rf"(?<![\w.]){re.escape(old)}\b")
    statements = tuple(
        Statement(pattern.sub(new, s.text), tuple(new if t == old else t for t in s.targets))
        for s in program.statements
    )
    outputs = tuple(dict.fromkeys(new if n == old else n for n in program.outputs))
    return replace(program, statements=statements, outputs=outputs)


def _fewer_sizes(program: Program) -> Iterator[Program]:
    if program.batches > 1:
        for row in range(program.batches):
            yield replace(program, inputs=tuple(replace(t, shapes=t.shapes[row : row + 1]) for t in program.inputs))
    for index, tensor in enumerate(program.inputs):
        if len(program.inputs) > 1 and not any(tensor.name in s.names for s in program.statements):
            if tensor.name not in program.outputs:
                yield replace(program, inputs=(*program.inputs[:index], *program.inputs[index + 1 :]))
        if tensor.trained:
            plain = replace(tensor, trained=False)
            yield replace(program, inputs=(*program.inputs[:index], plain, *program.inputs[index + 1 :]))
        if tensor.dtype != "float32":
            plain = replace(tensor, dtype="float32")
            yield replace(program, inputs=(*program.inputs[:index], plain, *program.inputs[index + 1 :]))
