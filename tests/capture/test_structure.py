"""Calls and outputs are flattened into tensors and structures, and rebuilt."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import sys
import timeit
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.modeling_outputs import SequenceClassifierOutput

from onnxtrain.capture.structure import OutputStructure, SameObjects, Structure, flatten_call, flatten_output
from onnxtrain.errors import ORTModuleIOError

X, Y, Z = torch.randn(2, 3), torch.randn(4), torch.arange(3)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def structure(*args: Any, **kwargs: Any) -> Structure:
    return flatten_call(args, kwargs)[1]


CALLS = {
    "one tensor": ((X,), {}),
    "tensors": ((X, Y), {"labels": Z}),
    "nothing": ((), {}),
    "dict": (({"a": X, "b": {"c": Y}},), {}),
    "lists and tuples": (([X, (Y, [Z])], ()), {}),
    "named tuple": ((Pair(X, Pair(None, Y)),), {}),
    "dataclass": ((Batch(X), Batch(Y, [Z])), {}),
    "ordered and default dict": ((collections.OrderedDict(b=X, a=Y), collections.defaultdict(list, k=Z)), {}),
    "output of transformers": ((SequenceClassifierOutput(logits=X),), {}),
    "constants": ((None, True, 1, 1.5, 1j, "a", b"b", ..., Color.RED, slice(0, 2), range(3), torch.float16), {}),
    "torch constants": ((torch.device("cpu"), torch.channels_last, torch.strided, torch.Size([1, 2])), {"x": X}),
    "the same tensor twice": ((X, {"again": X}), {}),
    "keys that are not strings": (({1: X, (2, "a"): Y},), {}),
    "return type": ((torch.randn(2, 2).max(0),), {}),
}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if dataclasses.is_dataclass(a):
        return equal(vars(a), vars(b))
    return bool(a == b)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_rebuilt(name: str) -> None:
    args, kwargs = CALLS[name]
    tensors, flattened = flatten_call(args, kwargs)
    assert len({*map(id, tensors)}) == len(tensors)
    rebuilt_args, rebuilt_kwargs = flattened.unflatten(tensors)
    assert equal(rebuilt_args, args)
    assert equal(rebuilt_kwargs, kwargs)
    assert flatten_call(args, kwargs)[1] is flattened
    assert len(set(flattened.names)) == len(tensors)
    assert all(name.isidentifier() for name in flattened.names)


@pytest.mark.parametrize("name", CALLS)
def test_each_call_gets_new_containers(name: str) -> None:
    args, kwargs = CALLS[name]
    tensors, flattened = flatten_call(args, kwargs)
    first, second = flattened.unflatten(tensors), flattened.unflatten(tensors)
    assert all(a is not b for a, b in zip(first[0], second[0], strict=True) if isinstance(a, (dict, list, Batch)))
    assert flattened.changed(*first, tensors) == ""


def test_tensors_are_named_after_their_arguments() -> None:
    assert structure(X, [Y], input_ids=Z, batch={"mask": X + 1}).names == (
        "args_0",
        "args_1_0",
        "input_ids",
        "batch_mask",
    )


def test_the_order_of_kwargs_is_part_of_the_structure() -> None:
    for kwargs in ({"a": X, "b": Y}, {"a": [X, 1], "b": Y}):
        one, a = flatten_call((), kwargs)
        two, b = flatten_call((), dict(reversed(kwargs.items())))
        assert a != b
        assert list(map(id, one)) == list(map(id, reversed(two))) == [id(X), id(Y)]


DIFFERENT = [
    (True, 1),
    (1, 1.0),
    (True, 1.0),
    (0.0, -0.0),
    (0.1, 0.2),
    (1.0, math.inf),
    (1, 1j),
    ("a", b"a"),
    (None, False),
    (Color.RED, Color.BLUE),
    (slice(0, 1), slice(0, True)),
    (torch.float16, torch.float32),
    (torch.device("cpu"), torch.device("meta")),
    ([X], (X,)),
    ([X], [X, Y]),
    ({"a": X}, {"b": X}),
    ({1: X}, {True: X}),
    ({"a": X, "b": Y}, {"b": Y, "a": X}),
    (Pair(X, Y), (X, Y)),
    (Batch(X), Batch(X, X + 1)),
    (X, [X]),
    (X, None),
    ((), []),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=lambda value: type(value).__name__)
def test_different_values_give_different_structures(a: Any, b: Any) -> None:
    old, new = structure(X, flag=a), structure(X, flag=b)
    assert old != new
    assert "flag" in old.difference(new) or "args" in old.difference(new)
    assert structure(X, a) != structure(X, b)


@pytest.mark.parametrize("value", [math.nan, -0.0, 1e-300, 2.5, None, "a", Color.RED, slice(None, 3), 1 + 2j])
def test_equal_constants_give_equal_structures(value: Any) -> None:
    assert structure(X, flag=value) is structure(Y, flag=value)
    assert structure(X, flag=[value]) == structure(Y, flag=[value])


def test_difference_describes_the_first_difference() -> None:
    assert structure(X, p=0.1).difference(structure(X, p=0.2)) == "p: 0.1 → 0.2"
    assert structure(X, mask=None).difference(structure(X, mask=Y)) == "mask: None → a tensor"
    assert structure(X).difference(structure(Y)) == ""
    assert "args[0]" in structure({"a": 1}).difference(structure({"b": 1}))


def test_passing_one_tensor_twice_is_part_of_the_structure() -> None:
    tensors, flattened = flatten_call((X, X), {})
    assert tensors == [X]
    assert flattened != structure(X, Y)
    assert "same tensor" in structure(X, Y).difference(flattened)


def test_shared_memory_is_part_of_the_structure() -> None:
    base = torch.randn(4, 6)
    flattened = structure(base[:, :3], base[:, 3:], Y)
    assert flattened.shared == ((0, 1),)
    assert flattened != structure(torch.randn(4, 3), torch.randn(4, 3), Y)
    assert structure(base[:1], base.detach().clone()).shared == ()


@pytest.mark.parametrize(
    "unsupported", [object(), {1, 2}, iter([1]), structure], ids=["object", "set", "iterator", "function"]
)
def test_the_error_names_an_unsupported_leaf(unsupported: Any) -> None:
    if unsupported is structure:  # a function is a constant
        assert structure(X, extra=unsupported) is structure(X, extra=unsupported)
        return
    with pytest.raises(ORTModuleIOError, match=r"extra\[0\]\.inner") as caught:
        flatten_call((X,), {"extra": [{"inner": unsupported}]})
    assert type(unsupported).__qualname__ in str(caught.value)


def test_a_cyclic_container_is_refused() -> None:
    cycle: list[Any] = [X]
    cycle.append(cycle)
    with pytest.raises(ORTModuleIOError, match="contains itself"):
        flatten_output(cycle)


def test_a_dataclass_with_attributes_that_are_no_fields_is_refused() -> None:
    batch = Batch(X)
    batch.extra = 1  # type: ignore[attr-defined]
    with pytest.raises(ORTModuleIOError, match="extra"):
        flatten_call((batch,), {})


def test_changes_of_the_containers_are_detected() -> None:
    tensors, flattened = flatten_call(({"a": X}, [Y]), {"z": [1]})
    for change in (
        lambda args, kwargs: args[0].update(b=Z),
        lambda args, kwargs: args[0].update(a=Z),
        lambda args, kwargs: args[1].append(Z),
        lambda args, kwargs: args[1].clear(),
        lambda args, kwargs: kwargs["z"].append(2),
    ):
        args, kwargs = flattened.unflatten(tensors)
        assert flattened.changed(args, kwargs, tensors) == ""
        change(args, kwargs)
        assert flattened.changed(args, kwargs, tensors)


OUTPUTS = {
    "tensor": X,
    "tuple": (X, Y),
    "nested": {"a": [X, (Y, None)], "b": Pair(Z, "text")},
    "dataclass with None": Batch(X),
    "output of transformers": SequenceClassifierOutput(loss=Y, logits=X),
    "constants only": {"a": 1, "b": None},
    "one tensor twice": (X, [X]),
    "empty": (),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_is_rebuilt(name: str) -> None:
    output = OUTPUTS[name]
    leaves, flattened = flatten_output(output)
    assert isinstance(flattened, OutputStructure)
    rebuilt = flattened.unflatten(leaves, ())
    assert equal(rebuilt, output)
    assert type(rebuilt) is type(output)
    if isinstance(output, SequenceClassifierOutput):
        assert rebuilt.logits is X
        assert rebuilt.hidden_states is None
        assert rebuilt["loss"] is Y


def test_output_structures_are_compared() -> None:
    assert flatten_output((X, "a"))[1] == flatten_output((Y, "a"))[1]
    assert flatten_output((X, "a"))[1] != flatten_output((X, "b"))[1]
    assert flatten_output((X, 1))[1] != flatten_output((X, True))[1]
    assert flatten_output((X, Y))[1] != flatten_output((X, X))[1]
    assert hash(flatten_output([X, None])[1]) == hash(flatten_output([Y, None])[1])


def test_a_cache_of_transformers_is_rebuilt() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    cache.update(torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 1)
    leaves, flattened = flatten_output((X, cache))
    assert len(leaves) == 5
    _, rebuilt = flattened.unflatten([t + 1 for t in leaves], ())
    assert type(rebuilt) is type(cache)
    assert rebuilt.get_seq_length() == 3
    assert torch.equal(rebuilt.layers[1].keys, cache.layers[1].keys + 1)


def test_sizes_have_their_own_list() -> None:
    flattened: list[tuple[list[Any], OutputStructure]] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[Any]:
            flattened.append(flatten_output((x * 2, x.shape, {"n": x.shape[0] * 2})))
            return flattened[-1][0]

    torch.export.export(Module(), (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    output = flattened[-1][1].unflatten([Y], [7, 14])
    assert output == (Y, torch.Size([7, 3]), {"n": 14})
    assert type(output[1]) is torch.Size


def test_flattening_is_fast(record_property: Any) -> None:
    batch = {"input_ids": X, "attention_mask": Y, "labels": Z}
    nested = {"batch": batch, "flag": True, "scale": 0.5}
    for name, call in (
        ("two tensors", lambda: flatten_call((X, Y), {})),
        ("three kwargs", lambda: flatten_call((), batch)),
        ("nested", lambda: flatten_call((), nested)),
    ):
        seconds = min(timeit.repeat(call, number=1000, repeat=5)) / 1000
        sys.stdout.write(f"flatten_call, {name}: {seconds * 1e6:.2f} µs\n")
        record_property(name, seconds)


def test_objects_are_compared_by_identity_in_their_order():
    one, equal = [1], [1]
    assert SameObjects([one, X]) == SameObjects(iter([one, X]))
    for others in ([equal, X], [X, one], [one], [one, X, X], []):
        assert SameObjects([one, X]) != SameObjects(others)
    assert SameObjects([X]) != [X]
