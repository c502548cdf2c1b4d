"""Memory of a process that answers: Python's garbage collector, out of the way of work that makes many objects and no
cycles; and what is kept of recordings for the next question about the same model."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_recording_caches: list[Any] = []
"""The `functools.lru_cache` of every function that `recording_cache` wraps"""


def recording_cache(maxsize: int) -> Callable[[Function], Function]:
    """`functools.lru_cache` for what is made of recordings, which `forget_recordings` can empty. Of ``maxsize`` results
    the newest are kept; some take 10 MB."""

    def wrap(function: Function) -> Function:
        cached: Any = functools.lru_cache(maxsize)(function)
        _recording_caches.append(cached)
        wrapped: Function = cached
        return wrapped

    return wrap


def forget_recordings() -> None:
    """Empties every `recording_cache`: tapes, and what was made of them, and collects what searches left in cycles. A
    process that is asked about one model after another would hold some 50 MB of each."""
    for cached in _recording_caches:
        cached.cache_clear()
    gc.collect()


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A context with Python's garbage collector switched off: it takes 40 % of a replay, as long as reading a tape, and
    finds nothing. In a process that froze objects of its own (``gc.freeze``) all that was made is looked through at the
    end: reading a tape takes eight times as long there."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # else they are somebody else's, to stay as they are
                # Puts all that was made into the oldest generation. Enabled as it is, it would look through all of it.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
