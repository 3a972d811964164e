"""Python programs that a test starts, talks to, and kills."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Program:
    """A running Python program; it prints a line when it has come to the point that the test waits for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def line(self) -> str:
        """Wait for the program's next line of output."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        assert line, "the program ended before it said anything"
        return line

    def kill(self) -> None:
        """End it as a power failure would: SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait(timeout=10) == -signal.SIGKILL


@contextlib.contextmanager
def running(source: str, *arguments: str) -> Iterator[Program]:
    """Run `source` as a program of its own, and see to it that it is gone afterwards."""
    process = subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait(timeout=10)
        assert process.stdout is not None
        process.stdout.close()
