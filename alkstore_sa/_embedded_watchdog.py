"""Ends a throw-away server when its owner is gone, however the owner went.

Nothing in a process can run after SIGKILL, so the clean-up lives in another one: this file is run as a script
(`python -I -S <this file> <folder>`) in a session of its own and blocks on its standard input, a pipe whose other
end only the owner holds. End of file therefore means "the owner has gone", with no polling and no pid to guess.

It imports the standard library only, and not much of it, because it is started with every server. The owner uses the
same functions for an orderly stop.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["end", "halt", "runs_in"]

_PAUSE = 0.005
_PATIENCE = 10.0  # seconds from SIGQUIT to SIGKILL; the server itself kills its children after 5
_GIVE_UP = 30.0


def runs_in(pid: int, folder: str) -> bool:
    """Say whether `pid` is a living process that was started on `folder`.

    The command line is looked at rather than the pid alone: a pid may have been given to a stranger since it was
    written down, and a zombie (which still answers `kill -0`) has no command line.
    """
    if pid <= 0:
        return False
    if Path("/proc/self/cmdline").exists():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
    else:
        line = subprocess.run(
            ["/bin/ps", "-ww", "-o", "command=", "-p", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        ).stdout
    return os.fsencode(folder) in line


def halt(folder: str, told: int = 0) -> None:
    """Stop at once (data is kept as a crash would leave it) whatever server runs in `folder`, and wait for its end.

    `told` is the last process that the owner started: a server that has not yet written its postmaster.pid, or
    initdb. The file is read anew each time round, for the server may have been restarted by somebody else.
    """
    begun = time.monotonic()
    sent: set[tuple[int, signal.Signals]] = set()
    while living := {pid for pid in (told, _recorded(folder)) if runs_in(pid, folder)}:
        waited = time.monotonic() - begun
        if waited > _GIVE_UP:
            return
        wanted = signal.SIGKILL if waited > _PATIENCE else signal.SIGQUIT
        for pid in living:
            if (pid, wanted) not in sent:
                sent.add((pid, wanted))
                _send(pid, wanted)
        time.sleep(_PAUSE)


def end(folder: str, told: int = 0) -> None:
    """Stop the server of `folder` and remove the folder."""
    begun = time.monotonic()
    while time.monotonic() - begun < _GIVE_UP:
        halt(folder, told)
        # Children of a server that was itself killed may add a file while the tree goes: hence the loop.
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            return
        time.sleep(_PAUSE)


def _recorded(folder: str) -> int:
    try:
        with Path(folder, "data", "postmaster.pid").open(encoding="utf-8", errors="replace") as file:
            return abs(int(file.readline()))  # a stand-alone backend, as initdb runs, writes its pid negated
    except (OSError, ValueError):
        return 0


def _send(pid: int, number: signal.Signals) -> None:
    # initdb's helpers are in its process group and have to go with it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(-pid if os.getpgid(pid) == pid else pid, number)


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A service manager signals the whole group of processes; this one has its work still before it.
        signal.signal(number, signal.SIG_IGN)
    told = 0
    for line in sys.stdin.buffer:
        told = int(line)
    end(sys.argv[1], told)


if __name__ == "__main__":
    _main()
