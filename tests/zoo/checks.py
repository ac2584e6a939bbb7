"""Compare a wrapped model with eager PyTorch.

Loss, gradients, outputs and their structure, buffers, the random stream, parameters after steps of an optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from onnxtrain import ORTModule
from onnxtrain.execute import tolerance
from onnxtrain.frontend.ort_module import engine_of
from onnxtrain.testing import assert_no_worse_than_eager
from tests.device_under_test import device, drop_comparably, exact_functions, random_state
from tests.torch_version import max_captures
from tests.zoo.entry import Call, ZooModel

Wrap = Callable[[torch.nn.Module], torch.nn.Module]
Optimizer = Callable[[Any], torch.optim.Optimizer]
Named = Mapping[str, torch.Tensor | None]
SEED = 77


def ours(module: torch.nn.Module) -> torch.nn.Module:
    """Wrap a model as tested by the zoo."""
    return ORTModule(module, rng="torch")


def count_captures(wrapped: torch.nn.Module) -> int:
    """The number of captures of an ORTModule."""
    count: int = engine_of(wrapped).captures
    return count


@dataclass
class Result:
    """The observable results of one call of a model and its backward."""

    output: Any
    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_states: list[torch.Tensor]


class Side:
    """One side of a comparison: a model, the way it is run, and the dtype."""

    def __init__(
        self,
        entry: ZooModel,
        dtype: torch.dtype,
        wrap: Wrap | None,
        autocast: bool = False,
        under: torch.dtype | None = None,
    ) -> None:
        self.entry, self.dtype, self.autocast = entry, dtype, autocast
        self.module = drop_comparably(entry.build(dtype), under or dtype)
        self.run = self.module if wrap is None else wrap(self.module)

    def call(self, batch: int, length: int) -> tuple[Call, Any]:
        """Run forward in the grad mode of the test."""
        call = self.entry.arguments(batch, length).to(self.dtype)
        torch.manual_seed(SEED + batch)
        with exact_functions(), torch.autocast(device().type, torch.bfloat16) if self.autocast else nullcontext():
            return call, self.run(*call.args, **call.kwargs)

    def forward(self, batch: int, length: int) -> Result:
        """Run a call without backward."""
        _, output = self.call(batch, length)
        return Result(output, None, {}, self._buffers(), [random_state()])

    def train(self, batch: int, length: int) -> Result:
        """Run a call and its backward."""
        self.module.zero_grad(set_to_none=True)
        call, output = self.call(batch, length)
        states = [random_state()]
        loss = self.entry.loss(output)
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        gradients = {name: p.grad for name, p in self.module.named_parameters()}
        gradients |= {name: t.grad for name, t in call.tensors() if t.requires_grad}
        return Result(output, loss.detach(), gradients, self._buffers(), [*states, random_state()])

    def perturbed(self) -> Iterator[Side]:
        """Sides whose parameters are perturbed by one rounding."""
        for module in tolerance.perturbed(self.module):
            side = copy.copy(self)
            side.module = side.run = module
            yield side

    def train_steps(self, make: Optimizer, count: int) -> dict[str, torch.Tensor]:
        """The parameters after some steps of an optimizer."""
        optimizer = make(self.module.parameters())
        for index in range(count):
            self.train(*self.entry.sizes[index])
            optimizer.step()
        return {name: p.detach().clone() for name, p in self.module.named_parameters()}

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {name: b.clone() for name, b in self.module.named_buffers()}


class Comparison:
    """Three sides: ours and eager in the dtype under test, and eager in float64."""

    def __init__(
        self, entry: ZooModel, dtype: torch.dtype = torch.float32, wrap: Wrap = ours, autocast: bool = False
    ) -> None:
        self.entry = entry
        self.got = Side(entry, dtype, wrap, autocast)
        self.eager = Side(entry, dtype, None, autocast)
        self.exact = Side(entry, torch.float64, None, under=dtype)

    def sides(self) -> tuple[Side, Side, Side]:
        return self.got, self.eager, self.exact

    def train(self, batch: int, length: int) -> None:
        """Compare a call and its backward."""
        results = [side.train(batch, length) for side in self.sides()]
        self._compare(f"{self.entry} ({batch}, {length})", *results)
        compare_named(
            f"{self.entry} ({batch}, {length}) gradient",
            *(result.gradients for result in results),
            samples=lambda: (side.train(batch, length).gradients for side in self.eager.perturbed()),
        )

    def train_narrow(self, *sizes: tuple[int, int], chance: float = 1.5) -> None:
        """Compare calls at all these sizes; chance may decide on a gradient at one of them.

        For ResNet under autocast where oneDNN has no convolutions in bfloat16: eager may be right by luck in the few
        elements of a bias. It fails at 6 of 75 sizes, by up to 1.39 times what is allowed, and eager in channels-last
        order at 5.
        In between all parameters move, so that narrow copies of earlier ones would be seen; alike, so that rounding
        does not add up.
        """
        results_by_size = []
        for size in sizes:
            results_by_size.append([side.train(*size) for side in self.sides()])
            self._compare(f"{self.entry} {size}", *results_by_size[-1])
            with torch.no_grad():
                for parameter in itertools.chain(*(side.module.parameters() for side in self.sides())):
                    parameter.mul_(0.75)
        compare_together(
            f"{self.entry} gradient", [[result.gradients for result in results] for results in results_by_size], chance
        )

    def forward(self, batch: int, length: int) -> None:
        """Compare a call without backward."""
        self._compare(f"{self.entry} ({batch}, {length})", *(side.forward(batch, length) for side in self.sides()))

    def train_steps(self, make: Optimizer, count: int = 2) -> None:
        """Compare the parameters after some steps of an optimizer."""
        compare_named(f"{self.entry} parameter", *(side.train_steps(make, count) for side in self.sides()))

    def change(self, edit: Callable[[torch.nn.Module], Any]) -> None:
        """Edit the model of each side, ours through its wrapper."""
        for side in self.sides():
            edit(side.run)

    def _compare(self, where: str, got: Result, eager: Result, exact: Result) -> None:
        """Compare all but the gradients."""
        compare_outputs(f"{where} output", got.output, eager.output, exact.output)
        if eager.loss is not None and got.loss is not None and exact.loss is not None:
            assert_no_worse_than_eager(f"{where} loss", got.loss, eager.loss, exact.loss)
        compare_named(f"{where} buffer", got.buffers, eager.buffers, exact.buffers)
        for when, ours_, theirs in zip(("forward", "backward"), got.random_states, eager.random_states, strict=False):
            assert torch.equal(ours_, theirs), f"{where}: the random state after {when} differs from eager's"


def compare_named(
    where: str, got: Named, eager: Named, exact: Named, samples: Callable[[], Iterable[Named]] = tuple
) -> None:
    """Compare tensors by name; rounding is judged by the largest element of all.

    `samples` gives more of eager's, with perturbed parameters, for tensors that are rounding noise.
    """
    assert list(got) == list(eager), f"{where}: names differ"
    missing = {name for name, tensor in got.items() if tensor is None}
    absent = {name for name, tensor in eager.items() if tensor is None}
    assert missing == absent, f"{where}: None for {sorted(missing)}, in eager for {sorted(absent)}"
    largest = largest_of(exact)
    for name, tensor in got.items():
        theirs, reference = eager[name], exact[name]
        if tensor is not None and theirs is not None and reference is not None:
            error, allowed, _ = tolerance.error_and_bound(tensor, theirs, reference, largest)
            if error > allowed and tolerance.is_noise(error, reference):
                others = (t for sample in samples() if (t := sample[name]) is not None)
                theirs = tolerance.noisiest([theirs, *others], reference)
            assert_no_worse_than_eager(f"{where} {name}", tensor.detach(), theirs, reference, largest)


def compare_together(where: str, calls: Sequence[Sequence[Named]], chance: float = 1.5) -> None:
    """Compare tensors by name: each call but one within the tolerance, and that one within `chance` times as much.

    `calls` holds ours, eager's and those in float64 of each call.
    """
    for got, eager, _ in calls:
        assert list(got) == list(eager), f"{where}: names differ"
    for name in calls[0][0]:
        ratios = sorted(over(name, *sides) for sides in calls)
        assert ratios[-1] <= chance, f"{where} {name}: error {ratios[-1]:.2f} times what is allowed"
        assert len(ratios) < 2 or ratios[-2] <= 1, f"{where} {name}: error above what is allowed in two calls: {ratios}"


def over(name: str, got: Named, eager: Named, exact: Named) -> float:
    """The error of a tensor as a multiple of the tolerance."""
    ours_, theirs, reference = got[name], eager[name], exact[name]
    if ours_ is None or theirs is None or reference is None:
        assert ours_ is theirs, f"{name}: one of them is None"
        return 0.0
    assert (ours_.dtype, ours_.shape) == (theirs.dtype, theirs.shape), name
    error, allowed, _ = tolerance.error_and_bound(ours_, theirs, reference, largest_of(exact))
    return error / allowed if allowed else math.inf if error else 0.0


def largest_of(tensors: Named) -> float:
    """The largest finite |element|."""
    finite = [t.detach().double().nan_to_num(posinf=0.0, neginf=0.0) for t in tensors.values() if t is not None]
    return max((t.abs().max().item() for t in finite if t.numel()), default=0.0)


def leaves(output: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The structure of an output: the type of every container and every leaf, with their paths."""
    if isinstance(output, Mapping):
        yield path, type(output)
        for key, value in output.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield path, type(output)
        for row in dataclasses.fields(output):
            yield from leaves(getattr(output, row.name), f"{path}.{row.name}")
    elif type(output).__module__ == "transformers.cache_utils":  # the keys and values of a model in eval mode
        yield path, type(output)
        for name, value in vars(output).items():
            yield from leaves(value, f"{path}.{name}")
    elif isinstance(output, (tuple, list)):
        yield path, type(output)
        for index, value in enumerate(output):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, output


def compare_outputs(where: str, got: Any, eager: Any, exact: Any) -> None:
    """Compare two outputs: structure, constants, tensors and their properties."""
    own, expected, references = (dict(leaves(o)) for o in (got, eager, exact))
    assert list(own) == list(expected), f"{where}: {list(own)}, eager has {list(expected)}"
    for path, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert type(own[path]) is type(value), f"{where}{path}: {own[path]!r}, eager has {value!r}"
            assert own[path] == value, f"{where}{path}: {own[path]!r}, eager has {value!r}"
            continue
        tensor = own[path]
        assert type(tensor) is type(value), f"{where}{path}: a {type(tensor)}, eager has a {type(value)}"
        assert tensor.requires_grad == value.requires_grad, f"{where}{path}: requires_grad is {tensor.requires_grad}"
        assert tensor.stride() == value.stride(), (
            f"{where}{path}: strides {tensor.stride()}, eager has {value.stride()}"
        )
        assert_no_worse_than_eager(f"{where}{path}", tensor.detach(), value.detach(), references[path].detach())


@contextmanager
def compared(
    entry: ZooModel, dtype: torch.dtype = torch.float32, autocast: bool = False, captures: int | None = 1
) -> Iterator[Comparison]:
    """A comparison during which the model is captured just so often, or falls back with just one warning.

    `captures` is None where another capture is right at some sizes: there must be one or more.
    """
    compare = Comparison(entry, dtype, autocast=autocast)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield compare
    texts = fallbacks(caught)
    if entry.falls_back is None:
        assert not texts, texts
        count = count_captures(compare.got.run)
        most = max_captures(compare.got.run) if captures == 1 else captures
        assert count > 0 if most is None else (captures or 1) <= count <= most, f"{count} captures"
    else:
        assert len(texts) == 1, texts
        assert re.search(entry.falls_back, texts[0]), texts[0]


def fallbacks(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """The texts of the warnings that a module runs in PyTorch."""
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return [text for text in texts if "runs in PyTorch" in text]


def wrong(module: torch.nn.Module, factor: float = 1.01) -> torch.nn.Module:
    """Replace ORTModule by a wrapper whose first gradient is wrong by a factor."""
    first = next(module.parameters())
    first.register_hook(lambda gradient: gradient * factor)
    return module


def keeps_its_parameters(module: torch.nn.Module) -> torch.nn.Module:
    """Replace ORTModule by a wrapper that computes with old copies of the parameters."""
    first = {name: p.detach().clone() for name, p in module.named_parameters()}

    def restore(*_: Any) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(first[name])

    module.register_forward_pre_hook(restore)
    return module
