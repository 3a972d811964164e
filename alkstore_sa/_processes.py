"""What becomes of connections, locks and threads when the process forks or ends."""

from __future__ import annotations

import atexit
import os
from functools import cache
from typing import Protocol
from weakref import WeakSet

__all__ = ["Flushes", "Forgets", "flush_at_exit", "forget_after_fork"]


class Forgets(Protocol):
    """Something that must not be shared with a child process."""

    def forget_after_fork(self) -> None:
        """Start anew, in the child, and leave what there was to the parent."""


class Flushes(Protocol):
    """Something that may have work left when the interpreter ends."""

    def flush_at_exit(self) -> None:
        """Do it now, within a bounded time."""


_forgets: WeakSet[Forgets] = WeakSet()
_flushes: WeakSet[Flushes] = WeakSet()


def forget_after_fork(thing: Forgets) -> None:
    """Have `thing` start anew in every child process, for as long as it lives."""
    _watch_forks()
    _forgets.add(thing)


def flush_at_exit(thing: Flushes) -> None:
    """Have `thing` flushed when the interpreter ends, if it lives until then."""
    _watch_exit()
    _flushes.add(thing)


@cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=_forget_all)


@cache
def _watch_exit() -> None:
    atexit.register(_flush_all)


def _forget_all() -> None:
    for thing in list(_forgets):
        thing.forget_after_fork()


def _flush_all() -> None:
    for thing in list(_flushes):
        thing.flush_at_exit()
