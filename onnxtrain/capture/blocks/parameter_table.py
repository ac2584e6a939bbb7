"""The table of a module's parameters that torch.export sees as empty, and forward as full.

If forward reads it, its parameters are revealed: a call node in the trace stands for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree

from onnxtrain.capture.node_storage import layout_of
from onnxtrain.torch_compat.dispatch import function_modes_disabled
from onnxtrain.torch_compat.fake_tensors import FakeTensor, fake_mode_of
from onnxtrain.torch_compat.operators import HigherOrderOperator


class RevealedParameter(HigherOrderOperator):
    """The operator of the call node of a revealed parameter; its argument is the parameter's name."""

    def __init__(self) -> None:
        super().__init__("onnxtrain_revealed_parameter")  # type: ignore[no-untyped-call]  # torch's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("a revealed parameter is replaced by an input before anything runs")


REVEALED = RevealedParameter()


class ParameterTable(dict[str, Any]):
    """The table of one module.

    Args:
        path: the path of the module in the root of the export.
        original: the module's own table.
        revealed: gets the names of the parameters that are revealed.

    Attributes:
        original: see above.
        is_read_by_forward: whether forward is running, so that reading the table reveals the parameters.
    """

    def __init__(self, path: str, original: dict[str, Any], revealed: set[str]) -> None:
        self.original = original
        self.is_read_by_forward = False
        self._path = path
        self._revealed = revealed
        self._fakes: dict[str, FakeTensor] = {}
        super().__init__({name: None for name, parameter in original.items() if parameter is None})

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Its parameters, by their names in the export."""
        return {f"{self._path}.{name}": p for name, p in self.original.items() if p is not None}

    def reveal(self) -> bool:
        """Add the parameters as fake tensors; return whether they were hidden."""
        if not self.is_read_by_forward or self._fakes:
            return False
        names = {name: f"{self._path}.{name}" for name, parameter in self.original.items() if parameter is not None}
        self._fakes = {name: _reveal(full, self.original[name]) for name, full in names.items()}
        self._revealed.update(names.values())
        dict.clear(self)
        dict.update(self, {name: self._fakes.get(name) for name in self.original})
        return True

    def conceal(self) -> None:
        """Remove the parameters. Those that forward has changed or removed stay, as a side effect of forward."""
        for name, fake in self._fakes.items():
            if not dict.__contains__(self, name):
                dict.__setitem__(self, name, None)
            elif dict.__getitem__(self, name) is fake and _is_unchanged(fake, self.original[name]):
                dict.__delitem__(self, name)
        self._fakes = {}

    def as_forward_reads_it(self) -> Mapping[str, Any]:
        """Return the table after `reveal`, with the user's tensors in place of parameters that are hidden."""
        return dict(dict.items(self)) if self._fakes else self.original

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (dict(self.items()),)


def _revealing(name: str) -> Callable[..., Any]:
    original = getattr(dict, name)

    def method(self: ParameterTable, *args: Any, **kwargs: Any) -> Any:
        self.reveal()
        return original(self, *args, **kwargs)

    return method


for _name in (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__",
    "__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem",
    "setdefault", "update", "values",
):  # fmt: skip
    setattr(ParameterTable, _name, _revealing(_name))


def registered(module: torch.nn.Module, table: str) -> Mapping[str, Any]:
    """Return a module's table of parameters or buffers, without revealing parameters."""
    items: Mapping[str, Any] = module.__dict__[table]
    return items.as_forward_reads_it() if isinstance(items, ParameterTable) else items


def _reveal(name: str, parameter: torch.nn.Parameter) -> FakeTensor:
    """Add a call node to the trace; return the fake tensor that it computes."""
    mode = get_proxy_mode()
    assert mode is not None, "forward runs under the tracer"
    with function_modes_disabled(), disable_proxy_modes_tracing(), torch.inference_mode(False), torch.enable_grad():
        fake: FakeTensor = fake_mode_of([]).from_tensor(parameter, static_shapes=True)
        proxy = mode.tracer.create_proxy("call_function", REVEALED, (name,), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=mode.tracer)
    return fake


def _is_unchanged(fake: FakeTensor, parameter: torch.nn.Parameter) -> bool:
    with function_modes_disabled():
        return layout_of(fake) == layout_of(parameter) and fake.requires_grad == parameter.requires_grad
