"""A limit counts the processor time of its thread, and cannot be caught on the way out."""

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from onnxtrain.system.time_limit import check_time, part, time_limit


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_without_a_limit_nothing_is_raised() -> None:
    with time_limit(None, RuntimeError):
        check_time()
    check_time()


def out_of_time(block: Callable[[], None] = check_time, error: type[Exception] = RuntimeError) -> None:
    with time_limit(0.01, error):
        work(0.02)
        block()


def test_the_error_names_the_parts_that_took_longest() -> None:
    def traced() -> None:
        with time_limit(0.12, RuntimeError):
            with part("tracing"):
                work(0.05)
                with part("guards"):
                    work(0.02)
                work(0.06)
            check_time()

    with pytest.raises(RuntimeError, match=r"^tracing 0\.[12] s, guards 0\.\d s$"):
        traced()


def test_waiting_uses_up_no_limit() -> None:
    with time_limit(0.05, RuntimeError):
        time.sleep(0.1)
        check_time()


def test_other_threads_use_up_no_limit() -> None:
    with time_limit(0.05, RuntimeError):
        thread = threading.Thread(target=work, args=(0.1,))
        thread.start()
        thread.join()
        check_time()


def test_an_error_that_was_caught_is_raised_at_the_end() -> None:
    def catches() -> None:
        with contextlib.suppress(RuntimeError):
            check_time()

    with pytest.raises(RuntimeError):
        out_of_time(catches)


def test_an_error_that_was_replaced_is_raised_at_the_end() -> None:
    def replaces() -> None:
        try:
            check_time()
        except RuntimeError:
            raise ValueError from None

    with pytest.raises(RuntimeError):
        out_of_time(replaces)


def test_other_errors_pass() -> None:
    def fails() -> None:
        raise ValueError("other")

    with pytest.raises(ValueError, match="other"):
        out_of_time(fails)


def test_an_inner_limit_does_not_extend_an_outer_one() -> None:
    def limited_again() -> None:
        with time_limit(60.0, ValueError):
            check_time()

    with pytest.raises(RuntimeError):
        out_of_time(limited_again)


def test_an_inner_limit_ends_before_an_outer_one() -> None:
    with time_limit(60.0, RuntimeError):
        with pytest.raises(ValueError, match=""):
            out_of_time(error=ValueError)
        check_time()
