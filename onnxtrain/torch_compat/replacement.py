"""Replace functions of PyTorch for the capturing thread, and restore them afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class for all threads; `value` must check which thread calls it.

    The caller must hold the capture lock: threads that exit in a different order than they entered
    would leave a replacement behind.
    """
    is_own = name in owner.__dict__  # else inherited, or a builtin
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def replaced_in_thread(owner: Any, name: str, replacement: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace a function of a module or class on this thread."""
    return replaced(owner, name, in_thread(replacement, getattr(owner, name)))


def in_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls `replacement` on this thread, and `original` on all others."""
    owner = threading.get_ident()

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == owner else original)(*args, **kwargs)

    return function
