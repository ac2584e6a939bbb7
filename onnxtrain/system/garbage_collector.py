"""Pause Python's garbage collector while a module is captured and compiled: `process_wide="pause_collector"`.

Capturing and compiling allocate millions of long-lived objects. With PyTorch and transformers loaded, a full collection
traverses another million: 0.05 to 0.2 s each time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused(enabled: bool) -> Iterator[None]:
    """Disable the collector inside the block, if `wanted`. If it was disabled before, it stays so. Nesting is safe.

    Afterwards the new objects are in the oldest generation: else the following steps would traverse them three times.
    """
    if not enabled or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else unfreeze would also unfreeze objects that the program froze
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        gc.enable()
