"""Python's garbage collector, while a module is captured and compiled: `process_wide="pause_collector"`.

Both make millions of objects that live on. With PyTorch and transformers loaded a full collection looks at a million
more: 0.05 to 0.2 s each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(wanted: bool) -> Iterator[None]:
    """Turn the collector off inside, where `wanted`. One that is off stays off; nested and concurrent uses are safe.

    What was made is old then: else it would be looked at three times in the steps that follow.
    """
    if not wanted or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else a program has frozen objects of its own, which would thaw
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
