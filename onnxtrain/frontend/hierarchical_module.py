"""HierarchicalORTModule: if a module cannot be captured as one graph, capture its largest submodules that can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onnxtrain.errors import ORTModuleFallbackException
from onnxtrain.frontend.ort_module import ForwardOfWrapper, ORTModule, engine_of
from onnxtrain.log import LOG
from onnxtrain.observe.initialisation import log_initialisation
from onnxtrain.options import FallbackPolicy
from onnxtrain.options.debug_options import DebugOptions
from onnxtrain.report import CompileReport

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # never called themselves


class HierarchicalORTModule(ORTModule):
    """Run `module` as one graph if it can be captured; else run each child as a graph, or the children of that child.

    The code of forward around the parts runs in PyTorch. A part is captured on its first call. A part that is called
    several times with different arguments has as many graphs as it needs.

    Args:
        module: any `nn.Module`. Its children are replaced by wrappers if needed; `state_dict` keys do not change.
        debug_options: as in ORTModule. The saved files of different parts have the same names.
    """

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None) -> None:
        super().__init__(module, debug_options, fallback_policy=FallbackPolicy.FALLBACK_DISABLE)
        self.__dict__["_divided"] = False
        self.__dict__["_parts"] = []
        self.__dict__["_debug_options"] = debug_options

    @ForwardOfWrapper
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward as one graph or part by part."""
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
        LOG.info("%s cannot be captured as one graph; running it part by part: %s", type(self.module).__name__, error)
        wrappers: dict[torch.nn.Module, HierarchicalORTModule] = {}
        _wrap_children(self.module, self.__dict__["_debug_options"], wrappers)
        self.__dict__["_parts"] = list(wrappers.values())

    def _log_parts(self) -> None:
        """Log one line for all graphs of the first call."""
        report = CompileReport(tuple(stage for part in self._reports() for stage in part.stages))
        log_initialisation(type(self.module).__name__, report.took_ms / 1e3, report, first=True)

    def _reports(self) -> Iterator[CompileReport]:
        """Return the reports of the graphs of this module and its parts."""
        for part in self.__dict__["_parts"]:
            yield from part._reports()
        engine = engine_of(self)
        if engine.captures:
            yield engine.newest().report


class _Part(HierarchicalORTModule):
    """A part of the user's module."""

    _is_part = True


def _wrap_children(
    module: torch.nn.Module,
    debug_options: DebugOptions | None,
    wrappers: dict[torch.nn.Module, HierarchicalORTModule],
) -> None:
    """Replace each child by a wrapper; a child that several modules share gets one."""
    for name, child in module._modules.items():
        if isinstance(child, _CONTAINERS):
            _wrap_children(child, debug_options, wrappers)
        elif child is not None and not isinstance(child, ORTModule):
            if child not in wrappers:
                wrappers[child] = _Part(child, debug_options)
            module._modules[name] = wrappers[child]
