"""ORTModule: a drop-in `nn.Module` whose forward and backward run as optimized ONNX graphs.

    model = ORTModule(model)          # the only change in a training script

The first call captures and compiles the module; later calls run the compiled programs. The module is captured again if
something that the graph depends on changes: the structure of the inputs, autocast, the module's attributes, which
parameters require gradients. A module that cannot be captured runs in PyTorch, with one warning that gives the reason.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import itertools
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxtrain.capture.refusals import refuse_module
from onnxtrain.capture.sharded.layout import gathering_of
from onnxtrain.capture.source_location import depth_of_caller, hide_own_frames
from onnxtrain.errors import ORTModuleTorchModelException
from onnxtrain.frontend import zero3
from onnxtrain.frontend.blocks import blocks_of, reason_of_hooks
from onnxtrain.frontend.dynamo import pieces
from onnxtrain.frontend.engine import Engine, set_up
from onnxtrain.frontend.entry_point import EntryPoint
from onnxtrain.frontend.region import install_in
from onnxtrain.options import FallbackPolicy, Options
from onnxtrain.options.debug_options import DebugOptions
from onnxtrain.report import CompileReport
from onnxtrain.torch_compat.dynamo import untraced

# Methods of nn.Module that act on parameters, buffers and children: the wrapper calls those of the wrapped module.
_DELEGATED = (
    "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "eval", "extra_repr", "float", "get_buffer",
    "get_parameter", "get_submodule", "half", "ipu", "load_state_dict", "modules", "mtia",
    "named_buffers", "named_children", "named_modules", "named_parameters", "parameters", "register_buffer",
    "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook", "register_parameter",
    "register_state_dict_post_hook", "register_state_dict_pre_hook", "requires_grad_",
    "set_submodule", "share_memory", "state_dict", "to", "to_empty", "train", "type", "xpu", "zero_grad", "_apply",
    "_load_from_state_dict", "_named_members", "_save_to_state_dict",
)  # fmt: skip

# PyTorch reads these directly if the wrapper is a child of another module: load_state_dict walks `_modules`.
_SHARED = (
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class ForwardOfWrapper:
    """The wrapper's forward; bound, it has the signature of the wrapped module's forward, which trainers read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, wrapper: ORTModule | None, owner: type[ORTModule] | None = None) -> Callable[..., Any]:
        if wrapper is None:
            return self.function
        signed: dict[ForwardOfWrapper, Callable[..., Any]] = wrapper.__dict__["_forwards"]
        function = signed.get(self)
        if function is None:
            function = signed[self] = _with_signature(self.function, wrapper.module.forward)
        return types.MethodType(function, wrapper)


def _with_signature(function: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function of (self, *args, **kwargs) with the signature of a bound method."""
    copied = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, closure=function.__closure__
    )
    copied.__doc__ = function.__doc__
    copied.__dict__.update(function.__dict__)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a ScriptModule's forward has no signature
        return copied
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [self_parameter, *signature.parameters.values()]
    copied.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # inspect reads it
    return copied


class ORTModule(torch.nn.Module):
    """Run `module` as an ONNX training graph.

    Args:
        module: any `nn.Module`. It keeps its parameters and buffers; `state_dict` keys do not change.
        debug_options: log level, and whether to save the graphs, as in ONNX Runtime Training.
        **options: any field of `onnxtrain.options.Options`, for example `rng="torch"` to sample exactly the random
            numbers of eager PyTorch.

    The attributes and methods of `module` are available on the wrapper. User-defined methods are bound to the wrapper:
    if one calls the module, the graph runs. Methods that use `super()` stay bound to `module`. Attributes set on the
    wrapper are set on `module`; if forward depends on one, the module is captured again. A method that overrides one of
    `module` stays on the wrapper. A UserWarning names each attribute of `module` that collides with one of the wrapper.

    Raises:
        ORTModuleTorchModelException: `module` is not an `nn.Module`; or it is a `torch.nn.DataParallel`, and the
            fallback policy does not cover that. Wrap the inner module instead.
    """

    _is_part = False  # whether the module is only part of the user's model

    def __init__(self, module: torch.nn.Module, debug_options: DebugOptions | None = None, **options: Any) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise ORTModuleTorchModelException(
                "The object cannot be wrapped.",
                "ORTModule",
                "a torch.nn.Module",
                type(module).__name__,
                "pass the module",
            ) from TypeError(type(module).__name__)
        settings = Options.resolve(**{**(debug_options or DebugOptions()).settings, **options})
        if isinstance(module, torch.nn.DataParallel):
            _refuse_at_once(module, settings.fallback_policy)
        self._set_up(module, settings)
        _warn_of_collisions(self, module)

    def _set_up(self, module: torch.nn.Module, options: Options) -> None:
        self.__dict__.pop("training", None)  # the wrapped module's flag is the one that counts
        self.__dict__.update((name, getattr(module, name)) for name in _SHARED)  # a traced module computes some
        self.__dict__["_torch_module"] = module
        self.__dict__["_forwards"] = {}
        self.__dict__["_options"] = options
        for region in self.__dict__.get("_regions", ()):
            region.remove()
        self.__dict__["_regions"] = []
        entry_point = EntryPoint(
            pieces=pieces(options), is_part=self._is_part, instead_of_capture=self._instead_of_capture
        )
        engine = self.__dict__["_engine"] = Engine(module, options, entry_point)
        self.__dict__["_run"] = set_up(engine, type(module).__name__, options)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped module."""
        original: torch.nn.Module = self.__dict__["_torch_module"]
        return original

    @ForwardOfWrapper
    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled forward of the wrapped module."""
        try:
            return self.__dict__["_run"](args, kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    def _instead_of_capture(self) -> Callable[..., Any] | None:
        """Return how to run a call if hooks, such as FSDP2's and ZeRO 3's, must run between parts of the module."""
        if gathering_of(self.module) is not None:
            return None
        blocks = blocks_of(self.module)
        if (reason := reason_of_hooks(blocks)) is not None:
            self.__dict__["_regions"] = install_in(blocks.values(), self.__dict__["_options"], reason)
            self.__dict__["_run"] = lambda args, kwargs: self.module(*args, **kwargs)
            return self.module
        if zero3.gathers_by_submodule(self.module):
            zero3.make_leaf(self.module)
            return zero3.gathered(self.module, engine_of(self))
        return None

    def report(self) -> CompileReport:
        """Return the report of the newest compilation: what each stage did.

        Raises RuntimeError before the first call.
        """
        reports = [report for r in self.__dict__["_regions"] if (report := r.region("").compiled) is not None]
        return reports[-1] if reports else engine_of(self).newest().report

    def load_options(self, path: str | os.PathLike[str]) -> None:
        """Read options from a JSON file. They override those of the code; environment variables override them.

        The module is captured again on the next call.

        Raises:
            OptionError: the file cannot be read, or has an unknown key or an invalid value.
        """
        self._set_up(self.module, self.__dict__["_options"].over_file(path))

    # The interface of nn.Module

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_torch_module")
        if module is None:
            raise AttributeError(name)
        value = getattr(module, name)
        return types.MethodType(value.__func__, self) if _runs_on_wrapper(value, module) else value

    def __setattr__(self, name: str, value: Any) -> None:
        # accelerate replaces the wrapper's forward by its own, which calls the wrapper's.
        if name in self.__dict__ or name == "forward" or "_torch_module" not in self.__dict__:
            super().__setattr__(name, value)
        elif _is_method(value) and _is_method(getattr(self.module, name, None)):
            self.__dict__[name] = value
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
        """Refuse to add a submodule to the wrapper.

        Raises:
            ORTModuleTorchModelException: always.
        """
        raise ORTModuleTorchModelException(
            "Submodules cannot be added to an ORTModule.",
            got=f"a submodule named {name!r}",
            todo="add it to the module before wrapping the module",
        ) from NotImplementedError("ORTModule.add_module")

    register_module = add_module

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the hooks of the wrapper, as `nn.Module.compile` does; the wrapped module runs as a graph."""
        self.__dict__.setdefault("_compiled_call_impl", None)  # else the wrapped module would get the attribute
        super().compile(*args, **kwargs)

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError("ORTModule does not run under torch.nn.DataParallel: use DistributedDataParallel")

    # A copy or pickle holds the module and the options; graphs are compiled again.

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = {
            *_SHARED, "_engine", "_run", "_torch_module", "_options", "_forwards", "_regions", "_compiled_call_impl",
        }  # fmt: skip
        own = {k: v for k, v in self.__dict__.items() if k not in rebuilt}
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


def engine_of(module: ORTModule) -> Engine:
    """Return the engine that captures, compiles and runs the module. A method could hide one of the wrapped module."""
    engine: Engine = module.__dict__["_engine"]
    return engine


def _rebuild(cls: type[ORTModule]) -> ORTModule:
    return cls.__new__(cls)


def _delegate(name: str) -> Callable[..., Any]:
    def call(self: ORTModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.module, name)(*args, **kwargs)
        return self if result is self.module else result

    call.__name__ = name
    call.__doc__ = f"`{name}` of the wrapped module."
    return call


class _OfInstance:
    """A method of the wrapped module; read from the class it is nn.Module's own.

    torch.distributed.checkpoint asks the class of each module whether it has an extra state.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: ORTModule | None, owner: type[ORTModule] | None = None) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(torch.nn.Module if wrapper is None else wrapper.module, self.name)
        return method


def _is_method(value: Any) -> bool:
    return isinstance(value, (types.MethodType, types.FunctionType))


def _runs_on_wrapper(value: Any, module: torch.nn.Module) -> bool:
    """Return whether a value is a user-defined method that can be bound to the wrapper.

    `super()` requires the module itself, and so does `type(self)`, as in the `generate` of transformers.
    """
    if not isinstance(value, types.MethodType) or value.__self__ is not module:
        return False
    function = inspect.unwrap(value.__func__)
    if getattr(torch.nn.Module, value.__name__, None) is function:
        return False
    return isinstance(function, types.FunctionType) and not _reads_own_class(function.__code__)


@functools.lru_cache(maxsize=256)
def _reads_own_class(code: types.CodeType) -> bool:
    """Return whether a method calls `super()` or `type(self)`."""
    if "__class__" in code.co_freevars:
        return True
    if "type" not in code.co_names or not code.co_argcount:
        return False
    loads = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname.startswith("LOAD_")]
    return any(
        read == ("LOAD_GLOBAL", "type") and name.startswith("LOAD_FAST") and argument == code.co_varnames[0]
        for read, (name, argument) in itertools.pairwise(loads)
    )


def _refuse_at_once(module: torch.nn.Module, policy: FallbackPolicy) -> None:
    """Raise, unless the policy lets such a module run in PyTorch."""
    try:
        refuse_module(module)
    except ORTModuleTorchModelException as error:
        if not policy.covers(error):
            raise


def _warn_of_collisions(wrapper: ORTModule, module: torch.nn.Module) -> None:
    """Warn of attributes that the wrapper hides, and of overrides that do not accept the arguments of nn.Module's."""
    own = {*vars(wrapper), *vars(ORTModule)} - set(dir(torch.nn.Module()))
    for name in sorted(name for name in own.intersection(dir(module)) if not name.startswith("__")):
        _warn_of_collision(module, name, f"use model.module.{name} for that of the wrapped module")
    for name in _DELEGATED:
        override = getattr(type(module), name, None)
        if override is not getattr(torch.nn.Module, name, None) and not _accepts_same_arguments(override, name):
            _warn_of_collision(module, name, "PyTorch and trainers call it with arguments that it does not accept")


def _accepts_same_arguments(override: Any, name: str) -> bool:
    """Return whether a method accepts the positional arguments of nn.Module's method of this name."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(getattr(torch.nn.Module, name)).parameters.values()
        inspect.signature(override).bind(*(p.name for p in parameters if p.kind in kinds))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def _warn_of_collision(module: torch.nn.Module, name: str, consequence: str) -> None:
    text = f"{type(module).__name__}'s attribute name {name} collides with ORTModule's attribute name: {consequence}"
    warnings.warn(text, UserWarning, stacklevel=depth_of_caller())


for _name in _DELEGATED:
    if hasattr(torch.nn.Module, _name):
        setattr(ORTModule, _name, _delegate(_name))
for _name in ("get_extra_state", "set_extra_state"):
    setattr(ORTModule, _name, _OfInstance(_name))
