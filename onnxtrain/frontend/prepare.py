"""`onnxtrain.prepare(model)`: the model's forward runs as ONNX graphs, and the model stays what it is.

    model ── its class, attributes, state_dict, hooks, methods: as before
      └─ forward ─▶ engine ─▶ programs          only this is exchanged, in the model or in each of its blocks

Where `ORTModule` wraps, this changes one attribute: `isinstance`, the signature of forward, `config`, `generate` and
`save_pretrained` are the model's own. Hooks of a prepared module run around its graph, so that what libraries do block
by block with hooks (FSDP's gathering, DDP's buckets, statistics) goes on.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import torch

from onnxtrain.capture.refusals import refuse_module
from onnxtrain.capture.source_line import hide_own_frames
from onnxtrain.errors import OptionError, ORTModuleTorchModelException
from onnxtrain.execute.compiled import Compiled
from onnxtrain.frontend.dynamo import pieces
from onnxtrain.frontend.engine import Call, Engine, EntryPoint, set_up
from onnxtrain.frontend.ort_module import ORTModule
from onnxtrain.observe import logs
from onnxtrain.options import Options
from onnxtrain.report import PrepareReport, Region
from onnxtrain.torch_compat.dynamo import untraced

M = TypeVar("M", bound=torch.nn.Module)
Regional = bool | Literal["auto"]

_KEY = "_onnxtrain_forward"
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def prepare(model: M, regional: Regional = "auto", **options: Any) -> M:
    """Lets `model` run as ONNX graphs, in place. A model that is prepared already is prepared anew.

    Args:
        model: any `nn.Module`. Its class, `state_dict` keys, the signature of forward and all methods stay.
        regional: True for a graph of each repeated block (the layers of a transformer), False for one graph of the
            whole model. "auto": the whole, but blocks where several processes train it together, or blocks have hooks.
            `report_of` says what was decided, and why.
        **options: any field of `onnxtrain.Options`.

    Returns:
        `model` itself.

    Raises:
        OptionError: an option is unknown or has a value that is not allowed, or there are no blocks to prepare.
        ORTModuleTorchModelException: the model is wrapped already (ORTModule, DataParallel), or a TorchScript module.
    """
    settings = Options.resolve(**options)
    if isinstance(model, (ORTModule, torch.jit.ScriptModule)):
        raise ORTModuleTorchModelException(
            f"a {type(model).__name__} cannot be prepared", todo="prepare the PyTorch module itself"
        )
    if not isinstance(model, torch.nn.Module):
        raise ORTModuleTorchModelException(
            "this cannot be prepared",
            expected="a torch.nn.Module",
            got=type(model).__name__,
            todo="pass the model itself",
        )
    if isinstance(model, torch.nn.DataParallel):
        refuse_module(model)
    unprepare(model)
    blocks = _blocks(model)
    by_block, reason = _decided(regional, model, blocks)
    twins = Twins()
    for module in blocks.values() if by_block else [model]:
        _Forward(module, settings, twins, reason).install()
    return model


def unprepare(model: M) -> M:
    """Gives `model`, and every block in it, its own forward back. One that is not prepared stays as it is."""
    for _, forward in _prepared(model):
        forward.remove()
    return model


def report_of(model: torch.nn.Module) -> PrepareReport:
    """How a model was prepared, and what was compiled for it until now.

    Raises:
        OptionError: it is not prepared.
    """
    found = list(_prepared(model))
    if not found:
        raise OptionError("The model is not prepared.", type(model).__name__, "onnxtrain.prepare(model) before")
    by_block = found[0][1].module is not model
    return PrepareReport(by_block, found[0][1].reason, tuple(forward.region(name) for name, forward in found))


def _prepared(model: torch.nn.Module) -> Iterator[tuple[str, _Forward]]:
    for name, module in list(model.named_modules()):
        forward = module.__dict__.get(_KEY)
        if isinstance(forward, _Forward):
            yield name, forward


# Whole or block by block


def _blocks(model: torch.nn.Module, path: str = "") -> dict[str, torch.nn.Module]:
    """The outermost modules that are repeated: two or more of a class in a list."""
    found: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        inner = f"{path}.{name}" if path else name
        members = dict(child.named_children())
        if isinstance(child, _LISTS) and len(members) > 1 and _are_blocks(list(members.values())):
            found |= {f"{inner}.{step}": member for step, member in members.items()}
        else:
            found |= _blocks(child, inner)
    return found


def _are_blocks(members: list[torch.nn.Module]) -> bool:
    """Of one class, and each of several layers: a graph of a single layer gains nothing."""
    return len({type(m) for m in members}) == 1 and all(_is_block(m) for m in members)


def _is_block(module: torch.nn.Module) -> bool:
    layers = [m for m in module.modules() if m is not module and any(True for _ in m.parameters(recurse=False))]
    return len(layers) > 1


def _decided(regional: Regional, model: torch.nn.Module, blocks: dict[str, torch.nn.Module]) -> tuple[bool, str]:
    """Whether to go block by block, and why."""
    if regional not in (True, False, "auto"):
        raise OptionError("The value is not allowed.", "regional", "True, False or 'auto'", repr(regional))
    if regional is True and not blocks:
        raise OptionError(
            "The model has no repeated blocks.",
            f"prepare({type(model).__name__}, regional=True)",
            "a ModuleList or Sequential of two or more modules of one class, with layers in each",
            todo="prepare(model, regional=False)",
        )
    if regional != "auto":
        return regional, "regional was given"
    if not blocks:
        return False, "the model has no repeated blocks"
    if logs.world_size() > 1:
        return True, "several processes train it, and gradients of one block are exchanged while others are computed"
    hooked = next((name for name, module in blocks.items() for n in _HOOKS if getattr(module, n)), None)
    if hooked is not None:
        return True, f"blocks have hooks, which run around their graphs ({hooked})"
    return False, "one process trains it, and no block has hooks"


# The forward that takes the place of the module's own


class Twins(dict[Any, list[Compiled]]):
    """What was compiled for blocks of one model, for others whose graph is the same. Copies start anew."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Twins, ()


class _Forward:
    """A module's forward, in the place of its own. It looks like a bound method: libraries ask for its function.

    Attributes:
        module: the module that it belongs to.
        options: as given to `prepare`.
        reason: why this module is a region.
        previous_forward: what stood in the module itself before; None: the forward of its class.
        __signature__, __func__, __self__: what `inspect` and other wrappers of forward look for.
    """

    # No dict: a capture compares what is in the dicts of a module's attributes.
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
        """Puts it in the place of the module's forward."""
        self.module.__dict__["forward"] = self.module.__dict__[_KEY] = self

    def remove(self) -> None:
        """Puts the module's own forward back. Where another was put around this one, it calls the module's own now."""
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
        """The module's own forward."""
        if self.previous_forward is not None:
            return self.previous_forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def region(self, name: str) -> Region:
        """What the report says of it."""
        engine = self._engine
        kind = type(self.module).__name__
        if not engine.captures:
            return Region(name, kind)
        return Region(name, kind, engine.newest().is_shared, engine.newest().report)

    # Copies and pickles: the module and the options; graphs are compiled again.

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        made = _Forward.__new__(_Forward)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Forward.__new__, (_Forward,), self.__getstate__()

    def __getstate__(self) -> Any:
        return (self.module, self.options, self._twins, self.reason, self.previous_forward)

    __setstate__ = _set_up


def _function(signature: inspect.Signature) -> Call:
    """What libraries take for the function behind a method: it finds the forward of the module that it is given."""

    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return module.__dict__[_KEY](*args, **kwargs)

    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [itself, *signature.parameters.values()]
    forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
    return forward
