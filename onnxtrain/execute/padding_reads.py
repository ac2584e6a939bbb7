"""Detect whether the user reads the padding of a module's results.

A packed program fills the padding of results [batch, steps, ..] with zeros, where eager has values. That is equivalent
if they are unread, such as the logits that a model returns besides its loss. A loss that reads them has a gradient
there:

    no backward yet                      batches run with padding
    no gradient in padding               batches run without padding from then on
    a gradient in padding, ever          batches run with padding from then on

Every backward is checked. The result of a check is read at the next call: backward does not wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from onnxtrain.log import LOG
from onnxtrain.ops.reshape.rows import permutation_to_front
from onnxtrain.passes.rowwise import Axes


class _Observation(NamedTuple):
    """The check of one backward of a result.

    Attributes:
        result: the index of the result.
        packed: whether the program that computed it ran without padding.
        reads_padding: whether any element of its gradient in padding is not 0.
    """

    result: int
    packed: bool
    reads_padding: torch.Tensor | bool


class PaddingReads:
    """Watches the gradients of the results of one module.

    Attributes:
        may_pack: whether a backward has shown for each result that its padding is unread.
        refuted: whether a backward has shown that padding is read, or a result has no gradient to check.
    """

    def __init__(self, results: Mapping[int, Axes], names: Sequence[str], module_name: str) -> None:
        """Watch `results`, given by their indices with their batch and step axes."""
        self._results, self._names, self._module_name = results, names, module_name
        self._observations: list[_Observation] = []
        self._unread: set[int] = set()
        self.refuted = False

    @property
    def may_pack(self) -> bool:
        return self._unread == self._results.keys()

    def update(self) -> None:
        """Evaluate the backwards since the last call."""
        while self._observations:
            observation = self._observations.pop(0)
            if not bool(observation.reads_padding):
                self._unread.add(observation.result)
            elif not self.refuted:
                self.refuted = True
                self._report(observation)

    def watch(self, results: Sequence[torch.Tensor], rows: torch.Tensor, packed: bool) -> None:
        """Check the gradients of `results` in their backward; `rows` are the flat indices of the kept tokens."""
        nodes: dict[torch.autograd.graph.Node, list[tuple[int, int]]] = {}
        for index in self._results:
            node = results[index].grad_fn
            if node is None:
                self.refuted = True
                LOG.info("%s runs with padding: its result %s has no gradient that could tell whether its padding is "
                         "read; keep_outputs can name the results that are used", self._module_name,
                         self._names[index])  # fmt: skip
                return
            nodes.setdefault(node, []).append((index, results[index].output_nr))
        for node, outputs in nodes.items():
            node.register_prehook(partial(self._check, outputs, rows, packed))

    def _check(
        self,
        outputs: Sequence[tuple[int, int]],
        rows: torch.Tensor,
        packed: bool,
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        for index, number in outputs:
            gradient = gradients[number]
            reads = gradient is not None and _any_in_padding(gradient.detach(), self._results[index], rows)
            self._observations.append(_Observation(index, packed, reads))

    def _report(self, observation: _Observation) -> None:
        name = self._names[observation.result]
        if observation.packed:
            LOG.warning("%s: the loss reads the padding of the result %s, which was zeros in the last step and has "
                        'eager\'s values from now on; skip_padding="never" gives them from the first step',
                        self._module_name, name)  # fmt: skip
        else:
            LOG.info("%s runs with padding: the loss reads the padding of the result %s", self._module_name, name)


def _any_in_padding(gradient: torch.Tensor, axes: Axes, rows: torch.Tensor) -> torch.Tensor:
    """Return whether any element outside `rows` of [batch, steps] is not 0: a bool []."""
    by_token = gradient.permute(permutation_to_front(gradient.dim(), axes)).flatten(0, 1)
    read = (by_token != 0).flatten(1).any(1) if by_token.dim() > 1 else by_token != 0
    return read.index_fill(0, rows, False).any()
