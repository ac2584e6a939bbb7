"""A region: a module whose forward is replaced by one that runs it as a graph, in place."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from onnxtrain.capture.source_location import hide_own_frames
from onnxtrain.execute.compiled import Compiled
from onnxtrain.execute.cuda_recorder import Recorders
from onnxtrain.frontend import zero3
from onnxtrain.frontend.dynamo import pieces
from onnxtrain.frontend.engine import Engine, set_up
from onnxtrain.frontend.entry_point import Call, EntryPoint
from onnxtrain.options import Options
from onnxtrain.report import Region
from onnxtrain.torch_compat.dynamo import untraced

KEY = "_onnxtrain_forward"


def install_in(modules: Iterable[torch.nn.Module], options: Options, reason: str) -> list[RegionForward]:
    """Make each module run as a graph, unless it does already; modules with the same graph share it."""
    twins = Twins()
    regions: list[RegionForward] = []
    for module in modules:
        region = module.__dict__.get(KEY)
        if not isinstance(region, RegionForward):
            region = RegionForward(module, options, twins, reason)
            region.install()
        regions.append(region)
    return regions


class Twins(dict[Any, list[Compiled]]):
    """The compiled units of one model's blocks; blocks with the same graph share one. A copy starts empty.

    Attributes:
        recorders: records the CUDA graphs of all blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorders = Recorders()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Twins, ()


class RegionForward:
    """Replaces a module's forward. It looks like a bound method, because libraries read `forward.__func__`.

    Attributes:
        module: the module.
        options: as passed to `prepare`.
        reason: why this module is a region.
        previous_forward: the instance attribute that it replaced; None if the module used the forward of its class.
        __signature__, __func__, __self__: read by `inspect` and by other wrappers of forward.
    """

    # No __dict__: a capture compares the __dict__ of a module's attributes.
    __slots__ = (
        *("__func__", "__signature__", "_engine", "_run", "_twins", "_undo_leaf"),
        *("module", "options", "previous_forward", "reason"),
    )
    __name__ = "forward"

    def __init__(self, module: torch.nn.Module, options: Options, twins: Twins, reason: str) -> None:
        self._set_up((module, options, twins, reason, module.__dict__.get("forward")))

    def _set_up(self, state: tuple[torch.nn.Module, Options, Twins, str, Call | None]) -> None:
        self.module, self.options, self._twins, self.reason, self.previous_forward = state
        self._undo_leaf: Callable[[], None] | None = None
        entry_point = EntryPoint(
            in_torch=self.in_torch,
            pieces=pieces(self.options),
            twins=self._twins,
            recorders=self._twins.recorders,
            instead_of_capture=self.instead_of_capture,
        )
        self._engine = Engine(self.module, self.options, entry_point)
        self._run = set_up(self._engine, type(self.module).__name__, self.options)
        self.__signature__ = inspect.signature(self.previous_forward or type(self.module).forward.__get__(self.module))
        self.__func__ = _function(self.__signature__)

    def install(self) -> None:
        """Replace the module's forward."""
        self.module.__dict__["forward"] = self.module.__dict__[KEY] = self

    def remove(self) -> None:
        """Restore the module's own forward. A wrapper that holds this object calls the module's own from now on."""
        if self._undo_leaf is not None:
            self._undo_leaf()
            self._undo_leaf = None
        own = self.module.__dict__
        if own.get("forward") is not self:
            own[KEY] = self.in_torch
            return
        del own[KEY], own["forward"]
        if self.previous_forward is not None:
            own["forward"] = self.previous_forward

    @property
    def __self__(self) -> torch.nn.Module:
        return self.module

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def instead_of_capture(self) -> Call | None:
        """Return how to run a call that no capture fits, if the module is not to be captured now."""
        if not zero3.gathers_by_submodule(self.module):
            return None
        self._undo_leaf = zero3.make_leaf(self.module)
        return zero3.gathered(self.module, self._engine)

    def in_torch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.previous_forward is not None:
            return self.previous_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def region(self, name: str) -> Region:
        """Return the module's entry in the report."""
        engine = self._engine
        kind = type(self.module).__name__
        if not engine.captures:
            return Region(name, kind)
        return Region(name, kind, engine.newest().is_shared, engine.newest().report)

    # A copy or pickle holds the module and the options; graphs are compiled again.

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).__new__, (type(self),), self.__getstate__()

    def __getstate__(self) -> Any:
        return (self.module, self.options, self._twins, self.reason, self.previous_forward)

    __setstate__ = _set_up


def _function(signature: inspect.Signature) -> Call:
    """Return the `__func__` of the forward.

    A function of (module, ...) that calls the prepared forward of that module.
    """

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.__dict__[KEY](*args, **kwargs)

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_parameter, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
    return forward
