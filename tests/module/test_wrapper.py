"""The interface of an ORTModule besides its results: forward's signature, methods, names, string arguments."""

import copy
import inspect
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain import ORTModule, errors
from onnxtrain.frontend.hierarchical_module import HierarchicalORTModule
from onnxtrain.frontend.ort_module import engine_of
from tests.reference import assert_matches

WRAPPERS = (ORTModule, HierarchicalORTModule)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *args: torch.Tensor, scale: float = 1.0, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = self.linear(x) * scale
        return result

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(x) + self(x)
        return result

    def described(self) -> str:
        return super().extra_repr() + "a net"


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_forward_has_the_modules_signature(wrap: Callable[[nn.Module], ORTModule]) -> None:
    ours = wrap(Net())
    assert inspect.signature(ours.forward) == inspect.signature(Net().forward)
    copied = copy.deepcopy(ours)
    assert copied.forward.__self__ is copied  # type: ignore[attr-defined]
    assert torch.equal(copied.forward(torch.ones(1, 3)), ours(torch.ones(1, 3)))


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_methods_run_on_the_wrapper(wrap: Callable[[nn.Module], ORTModule]) -> None:
    ours, x = wrap(Net()), torch.ones(1, 3)
    assert ours.twice.__func__ is Net.twice
    assert ours.twice.__self__ is ours
    assert_matches(ours.twice(x), Net.twice, ours.module, x)
    assert engine_of(ours).captures == 1
    assert ours.described() == "a net"  # super() needs the module itself
    assert ours.described.__self__ is ours.module


def test_a_method_put_on_the_wrapper_stays_there() -> None:
    def thrice(self: ORTModule, x: torch.Tensor) -> torch.Tensor:
        return 3 * self(x)

    ours, x = ORTModule(Net()), torch.ones(1, 3)
    ours.twice = types.MethodType(thrice, ours)
    assert torch.equal(ours.twice(x), 3 * ours(x))
    assert torch.equal(ours.module.twice(x), 2 * ours.module(x))
    copied = copy.deepcopy(ours)
    assert copied.twice.__self__ is copied
    del ours.twice
    assert ours.twice.__func__ is Net.twice


def test_colliding_names_are_warned_of() -> None:
    class Collides(Net):
        def __init__(self) -> None:
            super().__init__()
            self._torch_module = True

        def load_state_dict(self) -> None:  # type: ignore[override]
            pass

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return super().state_dict(*args, **kwargs)

    with pytest.warns(UserWarning, match="collides") as told:
        ORTModule(Collides())
    texts = [str(one.message) for one in told]
    assert [text.split(" collides")[0] for text in texts] == [
        "Collides's attribute name _torch_module", "Collides's attribute name load_state_dict"
    ]  # fmt: skip
    assert {one.filename for one in told} == {__file__}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ORTModule(nn.Sequential(nn.Linear(2, 2)))


def test_a_string_is_a_constant_and_warned_of_once() -> None:
    class Greets(nn.Module):
        def forward(self, x: torch.Tensor, text: str) -> torch.Tensor:
            return x + 1 if text.lower() == "hello" else x

    ours, x = ORTModule(Greets()), torch.ones(2)
    text = (
        r"Received input of type <class 'str'> which may be treated as a constant by ORT by default\. Please consider"
    )
    with pytest.warns(UserWarning, match=text):
        assert torch.equal(ours(x, "Hello"), x + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ours(x, "bye"), x)


def test_objects_that_are_not_modules_are_refused() -> None:
    error = errors.ORTModuleTorchModelException
    with pytest.raises(error, match=r"expected: +a torch\.nn\.Module\n +got: +function") as raised:
        ORTModule(lambda x: x)
    assert isinstance(raised.value.__cause__, TypeError)


def test_a_method_that_reads_its_class_stays_the_modules_own() -> None:
    class Strategies(Net):
        def _plain(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return type(self)._plain(self, x)  # as `generate` in transformers does

        def asks_its_argument(self, x: torch.Tensor) -> type:
            return type(x)

    ours, x = ORTModule(Strategies()), torch.ones(1, 3)
    assert torch.equal(ours.run(x), ours.module(x))
    assert ours.run.__self__ is ours.module
    assert ours.asks_its_argument.__self__ is ours
