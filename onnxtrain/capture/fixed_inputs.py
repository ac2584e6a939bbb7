"""Capture a graph for all elements of the inputs; if that fails, one for those that Python reads in this call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

import torch

from onnxtrain.capture.effects.side_effects import FirstCallError, SideEffectError
from onnxtrain.capture.guards.guards import AssumptionError
from onnxtrain.errors import CaptureError, SlowCaptureError
from onnxtrain.log import LOG

_Captured = TypeVar("_Captured")
_FIXES_INPUTS: WeakSet[torch.nn.Module] = WeakSet()  # modules of which earlier calls needed fixed inputs


def fixing_inputs_if_needed(
    module: torch.nn.Module,
    for_all_elements: Callable[[], _Captured],
    with_inputs_fixed: Callable[[], _Captured],
    reads_elements: Callable[[], bool],
) -> _Captured:
    """Return the first capture that succeeds.

    Args:
        module: the module that is captured.
        for_all_elements: captures a graph for all elements of the inputs.
        with_inputs_fixed: captures one for the elements that forward reads in this call (`guards.known_values`).
        reads_elements: whether the first of them failed in a forward that reads any.

    Raises:
        CaptureError: both failed; as the graph for all elements did.
        SideEffectError: forward changes Python state.
    """
    failed: CaptureError | None = None
    if module not in _FIXES_INPUTS:
        try:
            return for_all_elements()
        except (FirstCallError, SlowCaptureError):
            raise
        except CaptureError as error:
            if not isinstance(error, AssumptionError) and not reads_elements():
                raise
            failed = error
    try:
        captured = with_inputs_fixed()
    except SlowCaptureError:
        raise
    except SideEffectError:
        _FIXES_INPUTS.add(module)  # the next call has another state
        raise
    except CaptureError as error:
        LOG.info("not captured with the inputs fixed whose elements forward reads: %s", error)
        if failed is None:
            return for_all_elements()
        raise failed from None
    _FIXES_INPUTS.add(module)
    return captured
