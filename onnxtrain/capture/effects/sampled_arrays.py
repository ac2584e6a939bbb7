"""Capture functions that sample from Python's or numpy's generator, and return an array, as PythonOps.

    mask = torch.tensor(mask_spans((b, s), 0.05))     ──>     python_op([], [b, s], "mask_spans#0") -> [mask]

The node calls the user's function in every run, with the arguments of that run, so that a step samples what eager's
does and leaves the generator as eager's does. Functions of Python's random module that return a number become nodes
likewise (`sampled_numbers`). A trial run shows that the function samples, and that it returns a new
array whose shape depends on sizes only; all others run as they are, and `refuse_other_generators` refuses their
samples. Forward gets a `SampledArray`: the elements of each step are known only in the graph, so that PyTorch's
functions can make a tensor of them, and numpy cannot compute with them.
"""

from __future__ import annotations

import itertools
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from onnxtrain.capture import source_location
from onnxtrain.capture.effects.sampled_numbers import capturing_number, samples_number
from onnxtrain.capture.effects.sampling_class import sampling_class
from onnxtrain.capture.export.checkpoint_regions import current_region
from onnxtrain.capture.key.executed_code import with_nested
from onnxtrain.capture.python_functions.calls import FunctionCalls
from onnxtrain.errors import CaptureError
from onnxtrain.ops.python_function.run_context import is_uncaptured, python_states
from onnxtrain.torch_compat.patch_points import FROM_NUMPY
from onnxtrain.torch_compat.replacement import in_thread

_NUMPY: Any = np.random
_LIBRARIES: tuple[Any, ...] = (np.random, random)
_GENERATORS: tuple[Any, ...] = (_NUMPY.rand.__self__, random.random.__self__)  # type: ignore[attr-defined]  # of methods
_METHODS = (BuiltinMethodType, MethodType)
# Functions of numpy that read or set the generator's state, or change their argument.
_NO_SAMPLERS = frozenset({"get_state", "set_state", "shuffle"})
_SEEDS = itertools.count(1)
_TRIALS = 3  # runs of the function in a trial: the shape of its result must not depend on what it samples


@contextmanager
def sampling_by_nodes(
    module: torch.nn.Module, codes: Iterable[tuple[CodeType, dict[str, Any]]], calls: FunctionCalls
) -> Iterator[None]:
    """Capture each call of a function that samples and returns an array as a node of the graph.

    Args:
        module: the module that is captured.
        codes: the user's code that its forward may run, each with its globals.
        calls: the calls of this capture.
    """
    functions = _sampling_functions(module, codes)
    with ExitStack() as stack:
        if functions:
            stack.enter_context(FROM_NUMPY.replaced_in_thread(partial(_from_numpy, FROM_NUMPY.original)))
            stack.enter_context(_ArraysToTensors())
        for scope, name, function in functions:
            capture_calls = capturing_number if samples_number(function) else _capturing
            scope[name] = in_thread(capture_calls(function, calls), function)
            stack.callback(scope.__setitem__, name, function)
        yield


# Finding the functions

_Item: TypeAlias = tuple[dict[str, Any], str, Callable[..., Any]]  # a dict, a key and the value there


def _sampling_functions(module: torch.nn.Module, codes: Iterable[tuple[CodeType, dict[str, Any]]]) -> list[_Item]:
    """Return the functions that sample, among the globals of the code that forward may run and in their libraries."""
    classes = {base for submodule in module.modules() for base in type(submodule).__mro__}
    all_codes = [(f.__code__, f.__globals__) for base in classes for f in vars(base).values() if _is_of_user(f)]
    all_codes += codes
    scopes = {id(scope): scope for _, scope in all_codes}
    functions = [(scope, name, f) for scope in scopes.values() for name, f in scope.items() if _samples(f)]
    if functions or any(_names_generator(code, scope) for code, scope in all_codes):
        functions += [(vars(_NUMPY), name, f) for name, f in vars(_NUMPY).items() if _is_sampler(f)]
        functions += [(vars(random), name, f) for name, f in vars(random).items() if samples_number(f)]
    return functions


def _samples(value: Any) -> bool:
    return (
        _is_sampler(value)
        or samples_number(value)
        or (_is_of_user(value) and _names_generator(value.__code__, value.__globals__))
    )


def _is_sampler(value: Any) -> bool:
    """Return whether a value is a function of numpy that samples from its generator."""
    return isinstance(value, _METHODS) and value.__self__ is _NUMPY.rand.__self__ and value.__name__ not in _NO_SAMPLERS


def _is_of_user(value: Any) -> bool:
    return isinstance(value, FunctionType) and source_location.is_user_file(value.__code__.co_filename)


def _names_generator(code: CodeType, scope: dict[str, Any]) -> bool:
    """Return whether a function's code names Python's or numpy's generator, or one of their functions."""
    for nested in with_nested(code):
        for value in map(scope.get, nested.co_names):
            if value is np and "random" in nested.co_names:
                return True
            is_function = isinstance(value, _METHODS) and any(value.__self__ is g for g in _GENERATORS)
            if is_function or any(value is library for library in _LIBRARIES):
                return True
    return False


# Calling them


class _NotANodeError(CaptureError):
    """The trial run of a function showed that it has to run as it is."""


def _capturing(function: Callable[..., Any], calls: FunctionCalls) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        is_repeated = current_region() != ""  # eager samples again when backward recomputes a checkpoint
        if is_uncaptured() or is_repeated or not all(map(_is_unchangeable, (*args, *kwargs.values()))):
            return function(*args, **kwargs)
        try:
            return SampledArray(calls.apply(_sampling(function), (args, kwargs), {}))
        except CaptureError:
            return function(*args, **kwargs)

    return call


def _is_unchangeable(argument: Any) -> bool:
    """Return whether a trial run can leave no change in an argument, or whether the capture notices it."""
    if isinstance(argument, tuple):
        return all(map(_is_unchangeable, argument))
    return isinstance(argument, _UNCHANGEABLE)


_UNCHANGEABLE = (
    int, float, str, type(None), torch.SymInt, torch.SymFloat, torch.Tensor, torch.dtype, torch.device, np.dtype, type,
)  # fmt: skip


def _sampling(function: Callable[..., Any]) -> Any:
    def sample(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        array = _tried(function, args, kwargs) if is_uncaptured() else function(*args, **kwargs)
        return torch.from_numpy(np.array(array, order="C"))

    return sampling_class(function, function.__module__ or "numpy.random", sample)


def _tried(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function several times, each with other samples.

    Raises:
        _NotANodeError: it does not sample, does not return a new array, or its samples determine the array's shape.
    """
    arrays = []
    for _ in range(_TRIALS):
        seed = next(_SEEDS)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # the state is restored after the trial
        before = pickle.dumps(python_states())
        array = function(*args, **kwargs)
        has_sampled = pickle.dumps(python_states()) != before
        is_new = type(array) is np.ndarray and array.base is None and sys.getrefcount(array) <= _REFERENCES
        if not (has_sampled and is_new and array.flags.c_contiguous and array.dtype in _DTYPES):
            raise _NotANodeError(f"{function.__name__} does not sample a new array")
        arrays.append(array)
    if any((a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype) for a in arrays):
        raise _NotANodeError(f"the shape of what {function.__name__} returns depends on its samples")
    return arrays[0]


_REFERENCES = 2  # of the variable, and of the argument of getrefcount
_DTYPES = tuple(map(np.dtype, ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")))


# The values that forward gets


class SampledArray:
    """Stand for an array that a function of the graph returns: forward can make a tensor of it, and read its shape.

    It passes for an ndarray in `isinstance`, so that forward takes the same branch as in eager.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        object.__setattr__(self, "_tensor", tensor)

    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> Any:
        return np.ndarray

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(_tensor_of(self).shape)

    @property
    def ndim(self) -> int:
        return _tensor_of(self).ndim

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(name)


def _tensor_of(array: SampledArray) -> torch.Tensor:
    tensor: torch.Tensor = object.__getattribute__(array, "_tensor")
    return tensor


def _refuse(use: str) -> NoReturn:
    raise CaptureError(
        "forward computes with an array of samples, whose elements differ from step to step",
        where=source_location.of_caller(),
        expected="torch.tensor, torch.as_tensor or torch.from_numpy of the array, and operators on the tensor",
        got=use,
        todo="the module runs in PyTorch; make a tensor of the array first",
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    return lambda *_args, **_kwargs: _refuse(name)


_OF_EVERY_OBJECT = frozenset(dir(type("", (), {}))) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
for _name in {"__bool__", "__str__", "__repr__", "__format__", *dir(np.ndarray)} - _OF_EVERY_OBJECT:
    if _name.startswith("__"):
        setattr(SampledArray, _name, _refusing(_name))


class _ArraysToTensors(TorchFunctionMode):
    """Let torch.tensor and torch.as_tensor take a SampledArray."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and args and type(args[0]) is SampledArray:
            return _as_tensor(*args, is_copy=function is torch.tensor, **kwargs)
        return function(*args, **kwargs)


def _as_tensor(
    array: SampledArray, dtype: torch.dtype | None = None, device: Any = None, *, is_copy: bool
) -> torch.Tensor:
    device = torch.get_default_device() if device is None else device
    tensor = _tensor_of(array)
    return tensor.to(device=device, dtype=dtype or tensor.dtype, copy=is_copy)


def _from_numpy(original: Callable[[Any], torch.Tensor], array: Any) -> torch.Tensor:
    return _tensor_of(array) if type(array) is SampledArray else original(array)
