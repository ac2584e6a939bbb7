"""HierarchicalORTModule: where a module cannot be a graph as a whole, its parts are, as large as they can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain.errors import ORTModuleFallbackException
from onnxtrain.frontend.ort_module import ORTModule, OwnForward, engine_of
from onnxtrain.log import LOG
from onnxtrain.observe.initialisation import log_initialisation
from onnxtrain.options import FallbackPolicy
from onnxtrain.options.debug_options import DebugOptions
from onnxtrain.report import CompileReport

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # they are not called


class HierarchicalORTModule(ORTModule):
    """Runs `module` as one graph if it can be captured; if not, each of its children is tried in turn, and theirs.

    What forward does around the parts runs in PyTorch. A part is found when it is first called, and a module that is
    called several times, with other arguments each time, gets as many graphs as it needs.

    Args:
        module: any `nn.Module`. Children that are tried stand behind wrappers in it; `state_dict` keys do not change.
        debug_options: as in ORTModule; the files of different parts have the same names.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        super().__init__(module, debug_options, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
        self.__dict__["_divided"] = False
        self.__dict__["_parts"] = []
        self.__dict__["_debug_options"] = debug_options

    @OwnForward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, as one graph or part by part."""
        if self.__dict__["_divided"]:
            return self.module(*args, **kwargs)
        try:
            return super().forward(*args, **kwargs)
        except ORTModuleFallbackException as error:
            self._divide(error)
        output = self.module(*args, **kwargs)
        if not self._is_part:
            self._log_parts()
        return output

    def _divide(self, error: ORTModuleFallbackException) -> None:
        self.__dict__["_divided"] = True
        LOG.info("%s is no graph as a whole, and runs part by part: %s", type(self.module).__name__, error)
        made: dict[torch.nn.Module, HierarchicalORTModule] = {}
        _wrap_children(self.module, self.__dict__["_debug_options"], made)
        self.__dict__["_parts"] = list(made.values())

    def _log_parts(self) -> None:
        """One line for all graphs of the first call."""
        report = CompileReport(tuple(stage for each in self._reports() for stage in each.stages))
        log_initialisation(type(self.module).__name__, report.took_ms / 1e3, report, first=True)

    def _reports(self) -> Iterator[CompileReport]:
        """Of the graphs of this module and its parts."""
        for part in self.__dict__["_parts"]:
            yield from part._reports()
        engine = engine_of(self)
        if engine.captures:
            yield engine.newest().report


class _Part(HierarchicalORTModule):
    """A part of what the user trains."""

    _is_part = True


def _wrap_children(
    module: torch.nn.Module,
    debug_options: DebugOptions | None,
    made: dict[torch.nn.Module, HierarchicalORTModule],
) -> None:
    """Puts a wrapper in the place of each child; a child that stands in several places gets one."""
    for name, child in module._modules.items():
        if isinstance(child, _CONTAINERS):
            _wrap_children(child, debug_options, made)
        elif child is not None and not isinstance(child, ORTModule):
            if child not in made:
                made[child] = _Part(child, debug_options)
            module._modules[name] = made[child]
