"""`onnxtrain.prepare(model)`: run the model's forward as ONNX graphs, without a wrapper.

    model ── its class, attributes, state_dict, hooks, methods: unchanged
      └─ forward ─▶ engine ─▶ programs          the only change, in the model or in each of its blocks

`ORTModule` wraps the model; `prepare` replaces one attribute. `isinstance`, the signature of forward, `config`,
`generate` and `save_pretrained` are the model's own. The hooks of a prepared module run around its graph, so libraries
that work block by block with hooks (FSDP's all-gathers, DDP's buckets, statistics) keep working.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import torch

from onnxtrain.capture.export.patches import is_capturing
from onnxtrain.capture.refusals import refuse_module
from onnxtrain.capture.source_location import hide_own_frames
from onnxtrain.errors import OptionError, ORTModuleTorchModelException
from onnxtrain.execute.compiled import Compiled
from onnxtrain.frontend.dynamo import pieces
from onnxtrain.frontend.engine import Call, Engine, EntryPoint, set_up
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.options import Options
from onnxtrain.report import PrepareReport, Region
from onnxtrain.system import ranks
from onnxtrain.torch_compat.dynamo import untraced

M = TypeVar("M", bound=torch.nn.Module)
Regional = bool | Literal["auto"]

_KEY = "_onnxtrain_forward"
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def prepare(model: M, regional: Regional = "auto", **options: Any) -> M:
    """Make `model` run as ONNX graphs, in place. A second call replaces the settings of the first.

    Args:
        model: any `nn.Module`. Its class, `state_dict` keys, the signature of forward and all methods are unchanged.
        regional: True captures one graph for each repeated block (the layers of a transformer), False one graph of the
            whole model. "auto" captures the whole model, or blocks if several processes train the model together or
            blocks have hooks: at the first call, or once there is a process group. `report_of` gives the choice and
            the reason.
        **options: any field of `onnxtrain.Options`.

    Returns:
        `model` itself.

    Raises:
        OptionError: an option is unknown or has an invalid value, or the model has no repeated blocks.
        ORTModuleTorchModelException: the model is wrapped (ORTModule, DataParallel), or is a TorchScript module.
    """
    settings = Options.resolve(**options)
    if isinstance(model, (ORTModule, torch.jit.ScriptModule)):
        raise ORTModuleTorchModelException(
            "The model cannot be prepared.",
            "onnxtrain.prepare",
            "a torch.nn.Module that is not wrapped or scripted",
            type(model).__name__,
            "prepare the PyTorch module itself",
        )
    if not isinstance(model, torch.nn.Module):
        raise ORTModuleTorchModelException(
            "The model cannot be prepared.",
            "onnxtrain.prepare",
            "a torch.nn.Module",
            type(model).__name__,
            "pass the model itself",
        )
    if isinstance(model, torch.nn.DataParallel):
        refuse_module(model)
    unprepare(model)
    _install(model, regional, settings)
    return model


def _install(model: torch.nn.Module, regional: Regional, settings: Options) -> None:
    blocks = _blocks(model)
    by_block, reason = _choose_regional(regional, model, blocks)
    twins = Twins()
    if not by_block:
        forward = _AutoForward if regional == "auto" and blocks else _Forward
        forward(model, settings, twins, reason).install()
        return
    for block in blocks.values():
        _Forward(block, settings, twins, reason).install()


def unprepare(model: M) -> M:
    """Restore the forward of `model` and of its blocks. A model that is not prepared is left unchanged."""
    for _, forward in _prepared(model):
        forward.remove()
    return model


def report_of(model: torch.nn.Module) -> PrepareReport:
    """How a model was prepared, and what has been compiled for it so far.

    Raises:
        OptionError: the model is not prepared.
    """
    forwards = list(_prepared(model))
    if not forwards:
        raise OptionError(
            "The model is not prepared.", type(model).__name__, todo="call onnxtrain.prepare(model) first"
        )
    first = forwards[0][1]
    regions = tuple(forward.region(name) for name, forward in forwards)
    return PrepareReport(first.module is not model, first.reason, regions)


def _prepared(model: torch.nn.Module) -> Iterator[tuple[str, _Forward]]:
    for name, module in list(model.named_modules()):
        forward = module.__dict__.get(_KEY)
        if isinstance(forward, _Forward):
            yield name, forward


# As a whole or block by block


def _blocks(model: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """The outermost repeated modules, by path: two or more of one class in a list."""
    blocks: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        child_path = f"{path}.{name}" if path else name
        members = dict(child.named_children())
        if isinstance(child, _LISTS) and len(members) > 1 and _are_blocks(list(members.values())):
            blocks |= {f"{child_path}.{index}": member for index, member in members.items()}
        else:
            blocks |= _blocks(child, child_path)
    return blocks


def _are_blocks(members: list[torch.nn.Module]) -> bool:
    """Whether the modules are of one class and have several layers each: a graph of a single layer saves no time."""
    return len({type(m) for m in members}) == 1 and all(_is_block(m) for m in members)


def _is_block(module: torch.nn.Module) -> bool:
    layers = [m for m in module.modules() if m is not module and any(True for _ in m.parameters(recurse=False))]
    return len(layers) > 1


def _choose_regional(
    regional: Regional, model: torch.nn.Module, blocks: dict[str, torch.nn.Module]
) -> tuple[bool, str]:
    """Whether to prepare the model block by block, and the reason."""
    if regional not in (True, False, "auto"):
        where = f"prepare({type(model).__name__}, regional=)"
        raise OptionError("The value of regional is invalid.", where, "True, False or 'auto'", repr(regional))
    if regional is True and not blocks:
        raise OptionError(
            "The model has no repeated blocks.",
            f"prepare({type(model).__name__}, regional=True)",
            "a ModuleList or Sequential of two or more modules of one class, with layers in each",
            todo="call prepare(model, regional=False)",
        )
    if regional != "auto":
        return regional, f"regional={regional}"
    if not blocks:
        return False, "the model has no repeated blocks"
    if ranks.world_size() > 1:
        return True, "several processes train it: gradients of one block are exchanged while others are computed"
    hooked = next((name for name, module in blocks.items() for n in _HOOKS if getattr(module, n)), None)
    if hooked is not None:
        return True, f"blocks have hooks, which run around the graph of their block ({hooked})"
    return False, "one process trains it, and no block has hooks"


# The forward that replaces the module's own


class Twins(dict[Any, list[Compiled]]):
    """The compiled units of one model's blocks; blocks with the same graph share one. A copy starts empty."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Twins, ()


class _Forward:
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
        *("__func__", "__signature__", "_engine", "_run", "_twins", "module", "options", "previous_forward", "reason"),
    )
    __name__ = "forward"

    def __init__(self, module: torch.nn.Module, options: Options, twins: Twins, reason: str) -> None:
        self._set_up((module, options, twins, reason, module.__dict__.get("forward")))

    def _set_up(self, state: tuple[torch.nn.Module, Options, Twins, str, Call | None]) -> None:
        self.module, self.options, self._twins, self.reason, self.previous_forward = state
        entry_point = EntryPoint(in_torch=self.in_torch, pieces=pieces(self.options), twins=self._twins)
        self._engine = Engine(self.module, self.options, entry_point)
        self._run = set_up(self._engine, type(self.module).__name__, self.options)
        self.__signature__ = inspect.signature(self.previous_forward or type(self.module).forward.__get__(self.module))
        self.__func__ = _function(self.__signature__)

    def install(self) -> None:
        """Replace the module's forward."""
        self.module.__dict__["forward"] = self.module.__dict__[_KEY] = self

    def remove(self) -> None:
        """Restore the module's own forward. A wrapper that holds this object calls the module's own from now on."""
        own = self.module.__dict__
        if own.get("forward") is not self:
            own[_KEY] = self.in_torch
            return
        del own[_KEY], own["forward"]
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

    def in_torch(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        if self.previous_forward is not None:
            return self.previous_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def region(self, name: str) -> Region:
        """The module's entry in the report."""
        engine = self._engine
        kind = type(self.module).__name__
        if not engine.captures:
            return Region(name, kind)
        return Region(name, kind, engine.newest().is_shared, engine.newest().report)

    # A copy or pickle holds the module and the options; graphs are compiled again.

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self).__new__, (type(self),), self.__getstate__()

    def __getstate__(self) -> Any:
        return (self.module, self.options, self._twins, self.reason, self.previous_forward)

    __setstate__ = _set_up


class _AutoForward(_Forward):
    """A whole model's forward under regional="auto". It gives way to the model's blocks if they turn out better."""

    __slots__ = ("_called",)

    def _set_up(self, state: tuple[torch.nn.Module, Options, Twins, str, Call | None]) -> None:
        super()._set_up(state)
        self._called = False

    __setstate__ = _set_up

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (not self._called or ranks.world_size() > 1) and not is_capturing():
            self._called = True
            if _choose_regional("auto", self.module, _blocks(self.module))[0]:
                if self.module.__dict__.get(_KEY) is self:  # else this object is called by one that holds it
                    self.remove()
                    _install(self.module, "auto", self.options)
                return self.in_torch(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def _function(signature: inspect.Signature) -> Call:
    """The `__func__` of the forward: a function of (module, ...) that calls the prepared forward of that module."""

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.__dict__[_KEY](*args, **kwargs)

    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_parameter, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
    return forward
