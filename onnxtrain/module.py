"""ORTModule: a drop-in `nn.Module` whose forward and backward run as optimized ONNX graphs.

    model = ORTModule(model)          # the only change in a training script

The first call captures and compiles the module; later calls run the compiled programs. Another capture is made when
something that decides the graph changes: the structure of the inputs, autocast, the module's attributes, which
parameters need gradients. What cannot be captured runs in PyTorch, with one warning that says why.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxtrain.capture.refusals import refuse_module
from onnxtrain.capture.source_line import depth_of_caller, hide_own_frames
from onnxtrain.debug_options import DebugOptions
from onnxtrain.dynamo import pieces
from onnxtrain.engine import Engine, EntryPoint, set_up, untraced
from onnxtrain.errors import ORTModuleTorchModelException
from onnxtrain.options import FallbackPolicy, Options
from onnxtrain.report import CompileReport

# What nn.Module does with its own parameters, buffers and children, the wrapped module does with its.
_DELEGATED = (
    "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "eval", "extra_repr", "float", "get_buffer",
    "get_extra_state", "get_parameter", "get_submodule", "half", "ipu", "load_state_dict", "modules", "mtia",
    "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "register_buffer",
    "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook", "register_parameter",
    "register_state_dict_post_hook", "register_state_dict_pre_hook", "requires_grad_", "set_extra_state",
    "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train", "type", "xpu", "zero_grad", "_apply",
    "_load_from_state_dict", "_named_members", "_save_to_state_dict",
)  # fmt: skip

# PyTorch itself walks these where the wrapper is a part of another module: load_state_dict goes through `_modules`.
_SHARED = (
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


# What cannot be wrapped raises at once, unless the policy says that it is to run in PyTorch.
_IN_PYTORCH = FallbackPolicy.FALLBACK_BAD_INITIALIZATION
_AT_ONCE = FallbackPolicy.FALLBACK_DISABLE | _IN_PYTORCH


class ORTModule(torch.nn.Module):
    """Runs `module` as an ONNX training graph.

    Args:
        module: any `nn.Module`. It stays the owner of its parameters and buffers; `state_dict` keys do not change.
        debug_options: log level and whether to save the graphs, as in ORTModule.
        **options: any field of `onnxtrain.options.Options`, for example `rng="torch"` to draw exactly the random
            numbers that eager PyTorch draws.

    Attributes and methods of `module` are reached through the wrapper; attributes set on the wrapper are set on
    `module`, and a change that matters is followed by a new capture. A UserWarning tells of attributes of `module`
    that the wrapper hides: those named `module`, `report` or `load_options`.

    Raises:
        ORTModuleTorchModelException: `module` is a `torch.nn.DataParallel`: wrap the inner module instead.
    """

    _is_part = False  # whether it is one of several graphs of what the user trains

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> None:
        super().__init__()
        settings = Options.resolve(**{**(debug_options or DebugOptions()).settings, **options})
        if isinstance(module, torch.nn.DataParallel) and settings.fallback_policy & _AT_ONCE != _IN_PYTORCH:
            refuse_module(module)
        _warn_of_hidden_names(module)
        self._set_up(module, settings)

    def _set_up(self, module: torch.nn.Module, options: Options) -> None:
        self.__dict__.pop("training", None)  # the wrapped module's flag counts
        self.__dict__.update((name, module.__dict__[name]) for name in _SHARED)
        self.__dict__["_original"] = module
        self.__dict__["_options"] = options
        engine = self.__dict__["_engine"] = Engine(
            module, options, EntryPoint(pieces=pieces(options), is_part=self._is_part)
        )
        self.__dict__["_run"] = set_up(engine, type(module).__name__, options)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        original: torch.nn.Module = self.__dict__["_original"]
        return original

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward, compiled."""
        try:
            return self.__dict__["_run"](args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def report(self) -> CompileReport:
        """What each stage of the newest compilation did. Raises RuntimeError before the first call."""
        engine: Engine = self.__dict__["_engine"]
        return engine.newest().report

    def load_options(self, path: str | os.PathLike[str]) -> None:
        """Takes options from a JSON file; they win over the code's, and environment variables win over them.

        The module is captured again on the next call.

        Raises:
            OptionError: the file cannot be read, or has a key or value that is not allowed.
        """
        self._set_up(self.module, self.__dict__["_options"].over_file(path))

    # The nn.Module face

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")
        if original is None:
            raise AttributeError(name)
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # accelerate puts a forward of its own in the wrapper's place, which calls the wrapper's.
        if name in self.__dict__ or name == "forward" or "_original" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __repr__(self) -> str:
        return f"ORTModule({self.module!r})"

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]  # raises as the wrapped module does

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __bool__(self) -> bool:
        return True

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Not possible on the wrapper.

        Raises:
            ORTModuleTorchModelException: always.
        """
        raise ORTModuleTorchModelException(
            "a submodule cannot be added to an ORTModule", got=name, todo="add it to the module before wrapping"
        ) from NotImplementedError("ORTModule.add_module")

    register_module = add_module

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """`nn.Module.compile` of the wrapper: hooks on it are compiled, the wrapped module runs as a graph."""
        self.__dict__["_compiled_call_impl"] = torch.compile(self._call_impl, *args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError("ORTModule does not run under torch.nn.DataParallel: use DistributedDataParallel")

    # Copies and pickles: the module and the options; graphs are compiled again.

    def __getstate__(self) -> dict[str, Any]:
        remade = {*_SHARED, "_engine", "_run", "_original", "_options", "_compiled_call_impl"}
        own = {k: v for k, v in self.__dict__.items() if k not in remade}
        return {"own": own, "module": self.module, "options": self.__dict__["_options"]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["own"])
        self._set_up(state["module"], state["options"])

    def __deepcopy__(self, memo: dict[int, Any]) -> ORTModule:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self),), self.__getstate__()


def _rebuild(cls: type[ORTModule]) -> ORTModule:
    return cls.__new__(cls)


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    call.__name__ = name
    call.__doc__ = f"`{name}` of the wrapped module."
    return call


def _warn_of_hidden_names(module: torch.nn.Module) -> None:
    """Names what only `ORTModule(module).module` reaches, since the wrapper has something else of that name."""
    own = {name for name in vars(ORTModule) if not name.startswith("_") and not hasattr(torch.nn.Module, name)}
    if hidden := sorted(own.intersection(dir(module))):
        has = f"{type(module).__name__} has {', '.join(hidden)}, as ORTModule has"
        text = f"{has}: its own is reached by .module, as in model.module.{hidden[0]}"
        warnings.warn(text, UserWarning, stacklevel=depth_of_caller())


for _name in _DELEGATED:
    if hasattr(torch.nn.Module, _name):
        setattr(ORTModule, _name, _delegate(_name))
