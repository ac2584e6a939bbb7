"""The module that torch.export traces: the user's, as a function of a flat list of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from onnxtrain.capture.blocks.hidden_parameters import HiddenParameters
from onnxtrain.capture.blocks.module_tensors import ModuleTensors
from onnxtrain.capture.effects.assigned_attributes import (
    AssignedAttributes,
    find_assigned_attributes,
    find_reassigned_tensors,
    results_of,
    tensor_attributes,
)
from onnxtrain.capture.effects.assigned_buffers import AssignedBuffers
from onnxtrain.capture.effects.escaped_tensors import CreatedFakes
from onnxtrain.capture.effects.layout_changes import Layouts
from onnxtrain.capture.effects.side_effects import SideEffects
from onnxtrain.capture.guards.assumed_answers import AssumedAnswer
from onnxtrain.capture.guards.element_decisions import ElementDecisions, UndecidedError
from onnxtrain.capture.key.attribute_accesses import Attribute, AttributeAccesses
from onnxtrain.capture.key.surroundings import Surroundings
from onnxtrain.capture.refusals import refuse_moved_results
from onnxtrain.capture.sharded.gathered import sharded_parameters
from onnxtrain.capture.structure import OutputStructure, Structure, flatten_output
from onnxtrain.errors import (
    ChangedArgumentError,
    ORTModuleIOError,
)

ForwardCall: TypeAlias = Callable[..., Any]


class OutputHolder:
    """Carries what forward returned and assigned out of torch.export, which undoes assignments to attributes.

    Attributes:
        structure: of the output.
        assigned: the attributes that forward assigned.
        assigned_sizes: the number of sizes among their values.
        assumed: the answers that forward got without a decision, with indices among the results.
    """

    structure: OutputStructure
    assigned: AssignedAttributes
    assigned_sizes: int
    assumed: tuple[AssumedAnswer, ...]


class Wrapper(torch.nn.Module):
    """The user's module as a function of a flat list of tensors."""

    accesses: AttributeAccesses
    elements: ElementDecisions
    surroundings: Surroundings
    local_tensors: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        module: torch.nn.Module,
        structure: Structure,
        side_effects: SideEffects,
        call_forward: ForwardCall | None,
        elements: ElementDecisions,
    ) -> None:
        super().__init__()
        # Not through Module.__setattr__, which would register the module a second time.
        self.__dict__["accesses"] = AttributeAccesses()
        self.__dict__["elements"] = elements
        self.__dict__["_side_effects"] = side_effects
        self.__dict__["surroundings"] = side_effects.surroundings
        self.__dict__["_call_forward"] = call_forward or module
        sharded = sharded_parameters(module)
        self.__dict__["local_tensors"], self.__dict__["_as_values"] = sharded.as_local_tensors, sharded.as_values
        self.fakes = CreatedFakes()
        self.module = module
        self.hidden = HiddenParameters(self)
        self.__dict__["_tensors"] = ModuleTensors(self)
        self.structure = structure
        self.output = OutputHolder()

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        side_effects: SideEffects = self.__dict__["_side_effects"]
        args, kwargs = self.structure.unflatten(tensors)
        with side_effects.watching(), self.accesses.of_one_run():
            return self._results(args, kwargs, tensors, side_effects)

    def _results(self, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], side_effects: SideEffects) -> list[Any]:
        buffers = AssignedBuffers(self.module)
        layouts = Layouts(self.module, tensors)
        tensors_before = tensor_attributes(self.module)
        self.fakes.begin()
        try:
            answering = self.elements.answering(tensors, self.__dict__["_tensors"].traced())
            with answering, self.hidden.during_forward(), self.__dict__["_as_values"]():
                leaves, self.output.structure = flatten_output(self.__dict__["_call_forward"](*args, **kwargs))
        except UndecidedError as decision:
            return [*decision.tensors]
        if not leaves and not tensors:
            raise ORTModuleIOError(
                "the arguments and results of forward contain no tensor, and a graph computes with tensors",
                where=type(self.module).__name__,
                expected="at least one tensor among the arguments or results",
                todo="the module runs in PyTorch; a module without tensors gains nothing from a graph",
            )
        set_first = self.accesses.set_first()
        leaves, assigned_sizes = self._find_assigned(leaves, set_first, tensors_before)
        assigned = self.output.assigned
        side_effects.check(assigned.of(self.module), set_first)
        refuse_moved_results(leaves, [*tensors, *self.module.parameters(), *self.module.buffers()])
        layouts.check()
        buffers.write(leaves)
        changed = self.structure.changed(args, kwargs, tensors)
        if changed:
            raise ChangedArgumentError(
                "forward changes a container among its arguments, which a graph cannot replay",
                where=type(self.module).__name__,
                got=changed,
                todo="the module runs in PyTorch; let forward copy the container before it changes it",
            )
        del args, kwargs
        tested = self._assume(self.output.structure)
        self.fakes.record_held([*leaves, *tensors, *tested])
        return [*leaves, *assigned_sizes, *tested]

    def _find_assigned(
        self, leaves: list[Any], set_first: set[Attribute], before: Mapping[Attribute, torch.Tensor]
    ) -> tuple[list[Any], list[torch.SymInt]]:
        """Let the output hold the attributes that forward assigned; return its leaves with their tensors, and sizes."""
        tensors, sizes, assigned = find_assigned_attributes(self.module, set_first)
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results = own.copy()
        assigned = replace(assigned, results=results_of(tensors, results))
        if self.elements.values is not None:
            reassigned = find_reassigned_tensors(
                self.module, self.elements.values, self.accesses.sets - set_first, before
            )
            assigned = replace(assigned, tensors=reassigned)
        self.output.assigned, self.output.assigned_sizes = assigned, len(sizes)
        self.output.structure.names += tuple(f"attribute_{i}" for i in range(len(results) - len(own)))
        return [*results, *leaves[len(own) :]], sizes

    def _assume(self, output: OutputStructure) -> list[torch.Tensor]:
        """Return the tensors whose truth the graph assumes: they are further results, after those of the output."""
        first, assumed = len(output.names), self.elements.assumed
        output.names += tuple(f"assumed_{i}" for i in range(len(assumed)))
        self.output.assumed = tuple(replace(each, result=first + i) for i, (_, each) in enumerate(assumed))
        return [tensor for tensor, _ in assumed]
