"""A database cluster in a temporary folder, and the server process on it.

Who may do what decides the shape of this module. PostgreSQL refuses to run as root, so root starts it as another
user; from the moment that the folder is given to that user, root writes nothing into it any more (the other user could
put a link where root writes), but lets a child of that identity do so. Nothing that is not ours has its mode changed:
programs below a closed folder are copied instead. Other users of the machine are kept out by a random password and by
the absence of a socket file, since a superuser of PostgreSQL can run programs as the server's user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from alkstore_sa import _embedded_watchdog as watchdog
from alkstore_sa.errors import AlkstoreError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CAREFREE", "SETTINGS", "USER", "Cluster", "PostgresFailed"]

USER = "postgres"

SETTINGS: Mapping[str, str] = {
    "max_connections": "250",
    "max_prepared_transactions": "20",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "jit": "off",  # the majors differ in their default and the builds in whether they have it at all
    "max_wal_size": "256MB",
    # In the data folder, so that it goes with it: a server that is killed leaves POSIX shared memory behind.
    "dynamic_shared_memory_type": "mmap",
}

CAREFREE: Mapping[str, str] = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Settings for a server whose data nobody will miss."""

_ADDRESSES: Mapping[str, str] = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
# Making and dropping a database is some hundred files: 12 ms there, 10 to 200 ms on a disk.
_MEMORY = "/dev/shm"  # noqa: S108
_MEMORY_WANTED = 4 * 2**30  # a container's default is 64 MiB
_PAUSE = 0.005
_START_WITHIN = 60.0
_PORTS = range(15000, 32000)
_ATTEMPTS = 20

_pipes: set[int] = set()
_fork_hooked = False


class PostgresFailed(AlkstoreError):
    """A PostgreSQL was found, but its server could not be set up or started; the message has its own words."""


class _Identity(NamedTuple):
    """Whom a subprocess is to be; None throughout leaves it what we are."""

    user: int | None = None
    group: int | None = None
    extra_groups: list[int] | None = None


class Cluster:
    """A new cluster and its server, gone with `end` or with the process that made it."""

    def __init__(self, bin_dir: Path, settings: Mapping[str, str], *, in_memory: bool = False) -> None:
        """Make the cluster and start its server; `in_memory` allows a file system in memory.

        Raises:
            PostgresFailed: initdb or the server failed, or there is no user to run them as.
        """
        self.bin_dir: Path = bin_dir
        self.password: str = secrets.token_urlsafe(24)
        self.port: int = 0
        self._identity = _identity()
        self._process: subprocess.Popen[bytes] | None = None
        self._told = 0
        self.folder: str = tempfile.mkdtemp(prefix="alkstore-", dir=_reachable_folder(self._identity, in_memory))
        self.data_dir: Path = Path(self.folder, "data")
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._pipe, self._watchdog = _guard(self.folder)
            self._log = Path(self.folder, "server.log").open("ab+")  # noqa: SIM115 - open as long as the server
            undo.callback(self.end)
            self._settle_in()
            self._initialise({**_ADDRESSES, **settings})
            self._start_somewhere()
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id of the server as it was last started."""
        return self._told

    def kill(self) -> None:
        """Stop the server at once, without a checkpoint, and wait for its end. The data stays."""
        watchdog.halt(self.folder, self._told)
        if self._process is not None:
            self._process.wait()

    def start_again(self) -> None:
        """Start the server on the port that it had, after killing it if it still runs.

        Raises:
            PostgresFailed: it does not come up, for one because somebody has taken the port meanwhile.
        """
        self.kill()
        if not self._start(self.port):
            raise PostgresFailed(f"the server did not start again on port {self.port}:\n{self._log_tail()}")

    def end(self) -> None:
        """Stop the server, remove its folder and let the watchdog go. To be called once."""
        watchdog.end(self.folder, self._told)
        if self._process is not None:
            self._process.wait()
        self._log.close()
        _pipes.discard(self._pipe)
        os.close(self._pipe)
        self._watchdog.wait()

    def _settle_in(self) -> None:
        user, group, _ = self._identity
        if user is None or group is None:
            return
        if self.bin_dir.is_dir() and not _can_enter(self.bin_dir, self._identity):
            self.bin_dir = _copy(self.bin_dir, Path(self.folder, "programs"))
        # Last of all the folder itself: until then nobody else can interfere with what root does in it.
        for folder, _, files in os.walk(self.folder, topdown=False):
            for name in (*files, "."):
                os.chown(Path(folder, name), user, group, follow_symlinks=False)

    def _initialise(self, settings: Mapping[str, str]) -> None:
        secret = Path(self.folder, "password")
        self._append(secret, self.password + "\n")
        # macOS has no C.UTF-8; its C goes with any encoding.
        locale = "C" if sys.platform == "darwin" else "C.UTF-8"
        status, output = self._run(
            self.bin_dir / "initdb",
            f"--pgdata={self.data_dir}",
            f"--username={USER}",
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            f"--locale={locale}",
            "--no-sync",
        )
        if status != 0:
            raise PostgresFailed(f"{self.bin_dir / 'initdb'} failed with status {status}:\n{output}")
        secret.unlink()
        lines = (f"{name} = {_quoted(value)}\n" for name, value in settings.items())
        self._append(self.data_dir / "postgresql.conf", "".join(lines))

    def _start_somewhere(self) -> None:
        for _ in range(_ATTEMPTS):
            self.port = _free_port()
            if self._start(self.port):
                break
            if _is_free(self.port):
                raise PostgresFailed(f"the server of {self.bin_dir} ended at its start:\n{self._log_tail()}")
        else:
            raise PostgresFailed(f"others took each of {_ATTEMPTS} free ports before the server had it")
        if self._watchdog.poll() is not None:
            raise PostgresFailed(f"{sys.executable} ended at once as a watchdog: the server could outlive its owner")

    def _start(self, port: int) -> bool:
        # postgres itself and not pg_ctl: it is our child, so that its end is seen at once and leaves no zombie.
        process = self._popen(
            self.bin_dir / "postgres", "-D", self.data_dir, "-p", str(port), stdin=subprocess.DEVNULL, output=self._log
        )
        self._process = process
        deadline = time.monotonic() + _START_WITHIN
        while not self._is_ready(process.pid):
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise PostgresFailed(f"the server was not ready after {_START_WITHIN} s:\n{self._log_tail()}")
            time.sleep(_PAUSE)
        return True

    def _is_ready(self, pid: int) -> bool:
        try:
            lines = (self.data_dir / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        # The first line tells this server's file from one that a crashed server left behind.
        return lines[:1] == [str(pid)] and "".join(lines[7:8]).strip() in ("ready", "standby")

    def _append(self, path: Path, text: str) -> None:
        status, output = self._run("/bin/sh", "-c", 'umask 077; cat >> "$0"', path, text=text)
        if status != 0:
            raise PostgresFailed(f"cannot write {path}: {output}")

    def _run(self, *command: str | Path, text: str = "") -> tuple[int, str]:
        process = self._popen(*command, stdin=subprocess.PIPE, output=subprocess.PIPE)
        output, _ = process.communicate(text.encode())
        return process.returncode, output.decode(errors="replace").strip()

    def _popen(self, *command: str | Path, stdin: int, output: int | BinaryIO) -> subprocess.Popen[bytes]:
        # A session of its own keeps the terminal's Ctrl-C, which is meant for the owner, away from the server.
        try:
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=_environment(),
                start_new_session=True,
                user=self._identity.user,
                group=self._identity.group,
                extra_groups=self._identity.extra_groups,
            )
        except OSError as error:
            raise PostgresFailed(f"{command[0]} does not run: {error.strerror}") from error
        self._told = process.pid
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, b"%d\n" % process.pid)
        return process

    def _log_tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        return self._log.read().decode(errors="replace").strip()


def _guard(folder: str) -> tuple[int, subprocess.Popen[bytes]]:
    global _fork_hooked  # noqa: PLW0603 - a fork hook can't be taken back, so there is one for the process
    if not _fork_hooked:
        os.register_at_fork(after_in_child=_close_pipes)
        _fork_hooked = True
    reading, writing = os.pipe()  # neither is inherited by other programs
    _pipes.add(writing)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", watchdog.__file__, folder],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        _pipes.discard(writing)
        os.close(writing)
        raise PostgresFailed(f"no watchdog: {sys.executable!r} does not run ({error.strerror})") from error
    finally:
        os.close(reading)
    return writing, process


def _close_pipes() -> None:
    # A forked child that held the pipe would keep the server alive after the owner's death.
    for pipe in _pipes:
        os.close(pipe)
    _pipes.clear()


def _identity() -> _Identity:
    if os.geteuid() != 0:
        return _Identity()
    import pwd  # noqa: PLC0415 - not on Windows, where this module is only imported

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return _Identity(user.pw_uid, user.pw_gid, [])
    raise PostgresFailed("PostgreSQL does not run as root, and this system has no user postgres or nobody to run it as")


def _reachable_folder(identity: _Identity, in_memory: bool) -> str:  # noqa: FBT001
    usual = tempfile.gettempdir()
    candidates = [usual, "/tmp", "/var/tmp"]  # noqa: S108 - mkdtemp makes a folder of our own below it
    # Only where nobody has chosen another folder, as by TMPDIR.
    if in_memory and usual == "/tmp" and _has_room(_MEMORY):  # noqa: S108
        candidates.insert(0, _MEMORY)
    for folder in candidates:
        if identity.user is None or _can_enter(folder, identity):
            return folder
    raise PostgresFailed(f"uid {identity.user}, which has to run PostgreSQL, can't enter {usual}, /tmp or /var/tmp")


def _has_room(folder: str) -> bool:
    try:
        room = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK) and room.f_bavail * room.f_frsize >= _MEMORY_WANTED


def _can_enter(folder: str | Path, identity: _Identity) -> bool:
    # Tried and not reckoned from modes, which are not all that decides.
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", 'cd "$0"', folder],
            cwd="/",
            env=_environment(),
            capture_output=True,
            check=False,
            user=identity.user,
            group=identity.group,
            extra_groups=identity.extra_groups,
        )
    except OSError as error:
        raise PostgresFailed(f"this root may not become uid {identity.user}: {error.strerror}") from error
    return done.returncode == 0


def _copy(bin_dir: Path, to: Path) -> Path:
    """Copy the programs and what they need to `to`, and return the new place of the programs."""
    install = bin_dir.parent
    package = install.parent
    target = to / package.name / install.name
    for name in {bin_dir.name, "lib", "lib64", "share"}:
        if (install / name).is_dir():
            shutil.copytree(install / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("*.a"))
    # The programs of a wheel look for its libraries relative to themselves, beside the package.
    libraries = package.parent / f"{package.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, to / libraries.name)
    return target / bin_dir.name


def _environment() -> dict[str, str]:
    """Return a small environment: no PG* variable changes the server, no secret reaches a process of another user."""
    kept = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"LC_ALL": "C", "TZ": "UTC"}


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _free_port() -> int:
    # Not bind(0): its ports are those of outgoing connections, so while the server is down any connection, even a
    # client's own attempt to reach it, could take the port that the server has to come back to.
    for _ in range(1000):
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if _is_free(port):
            return port
    raise PostgresFailed(f"no free port between {_PORTS.start} and {_PORTS.stop} on 127.0.0.1")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as PostgreSQL does
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
