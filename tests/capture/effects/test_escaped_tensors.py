"""The search for objects outside the module that hold a tensor of the trace."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from onnxtrain.capture.effects.escaped_tensors import CreatedFakes
from onnxtrain.errors import CaptureError
from tests.thinned import slow_but_every


def created(*tensors: torch.Tensor) -> CreatedFakes:
    fakes = CreatedFakes()
    fakes._held = [(weakref.ref(tensor), None) for tensor in tensors]  # type: ignore[misc]
    return fakes


def test_one_search_for_all_tensors() -> None:
    """Each search visits all objects of the process: one per tensor would take minutes without `use_count`."""
    first, second, third = torch.empty(1), torch.empty(1), torch.empty(1)
    fakes, searches = created(first, second, third), []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and argument is gc.get_referrers:
            searches.append(event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fakes.check(nn.Identity())
    finally:
        sys.setprofile(before)
    assert len(searches) == 2  # for the tensors, and for the tuples that hold them with their locations


@pytest.mark.parametrize(
    "hold", slow_but_every(3, [lambda t: [t], lambda t: [(t, 1)], lambda t: [((t,),)]]), ids=("list", "pair", "deep")
)
def test_a_holder_is_found(hold: Any) -> None:
    first, second = torch.empty(1), torch.empty(1)
    holder = hold(second)
    with pytest.raises(CaptureError, match="stores a tensor in a"):
        created(first, second).check(nn.Identity())
    assert holder is not None
