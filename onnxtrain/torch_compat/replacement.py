"""Replace functions of PyTorch for the thread that captures, and put them back afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a module or class another value, for all threads: `value` asks for its thread.

    The capture lock must be held: two threads that end in another order than they began would leave a value behind.
    """
    own = name in owner.__dict__
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def replaced_in_thread(owner: Any, name: str, changed: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let a function of a module or class be `changed` on this thread."""
    return replaced(owner, name, in_thread(changed, getattr(owner, name)))


def in_thread(changed: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `changed` on this thread, and `original` on all others."""
    owner = threading.get_ident()

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (changed if threading.get_ident() == owner else original)(*args, **kwargs)

    return function
