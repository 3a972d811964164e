"""The connection that listens, as asyncpg and psycopg have it: one interface to both.

It is opened with everything that the engine opens connections with (URL, `connect_args`, creator, events), but outside
the engine's pool: through a private copy of that pool, from which it is detached at once. From then on the driver is
used directly, since SQLAlchemy has no interface to notifications.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from alkstore_sa._channels import quote_channel
from alkstore_sa._rules import error_text
from alkstore_sa._tasks import kept
from alkstore_sa.errors import UnsupportedDialect

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy import Connection

__all__ = ["Wire", "WireLost", "open_wire"]

T = TypeVar("T")

GOODBYE: Final = 1.0
WHO: Final = "SELECT pg_backend_pid()"


class WireLost(ConnectionError):
    """The listening connection is gone, or does not answer any more."""


class Wire:
    """A connection that listens. Every operation is bounded in time; one that fails has ended the connection."""

    def __init__(self, driver: _Driver, timeout: float) -> None:
        self._driver = driver
        self._timeout = timeout

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.lost

    async def listen(self, channel: str) -> None:
        """Have notifications on `channel` arrive, those committed from now on."""
        await self._bounded(self._driver.listen(channel))

    async def unlisten(self, channel: str) -> None:
        """Have them arrive no more."""
        await self._bounded(self._driver.unlisten(channel))

    async def notify(self, channel: str) -> None:
        """Send an empty notification."""
        await self._bounded(self._driver.ask(f"NOTIFY {quote_channel(channel)}"))

    async def check(self) -> bool:
        """Have the server answer; return whether it is the backend that this connection was opened to."""
        return int(await self._bounded(self._driver.ask(WHO))) == self._driver.server_pid

    async def close(self) -> None:
        """Close the connection, politely where the server still answers within a second."""
        try:
            await _within(GOODBYE, self._driver.close(), self._driver.terminate)
        except self._driver.errors:
            self._driver.terminate()

    async def _bounded(self, operation: Coroutine[Any, Any, T]) -> T:
        try:
            return await _within(self._timeout, operation, self._driver.terminate)
        except self._driver.errors as error:
            self._driver.terminate()
            raise WireLost(f"the listening connection is lost: {error_text(error)}") from error


async def open_wire(
    engine: AsyncEngine, on_notify: Callable[[str, str], None], on_lost: Callable[[], None], timeout: float
) -> Wire:
    """Open a connection for listening.

    Args:
        engine: whose settings it is opened with.
        on_notify: called on the event loop with the channel and the payload of each notification.
        on_lost: called once, on the event loop, when the connection turns out to be gone.
        timeout: how long the opening, and each operation, may take, in seconds.

    Raises:
        UnsupportedDialect: the engine's driver is neither asyncpg nor psycopg.
        DBAPIError, OSError: there is no connection to be had.
    """
    kind = DRIVERS.get(engine.dialect.driver)
    if kind is None:
        raise UnsupportedDialect(f"listening needs asyncpg or psycopg, not {engine.dialect.driver}")

    async def opened() -> Wire:
        return Wire(kind(await _open(engine), on_notify, on_lost), timeout)

    try:
        # Half a connection would stay with the server, which waits a minute for the rest. So one that is not wanted any
        # more becomes a whole one if it can, before it is closed.
        return await kept(opened(), GOODBYE, limit=timeout, drop=Wire.close)
    except asyncio.TimeoutError:
        raise WireLost(f"the server has not answered within {timeout:g} s") from None


async def _open(engine: AsyncEngine) -> Any:
    """Return a driver's connection that belongs to nobody else."""
    original = engine.sync_engine
    # The engine's own pool may have no connection left to give, now or ever.
    private = AsyncEngine(Engine(original.pool.recreate(), original.dialect, original.url))

    def detach(connection: Connection) -> Any:
        raw = connection.connection
        driver_connection: Any = raw.driver_connection
        raw.commit()  # what the application's own listeners did to the new connection: LISTEN would wait for it
        raw.detach()
        return driver_connection

    # Not closed afterwards: there is nothing left in it, and closing it would close the driver's connection.
    return await (await private.connect()).run_sync(detach)


async def _within(seconds: float, operation: Coroutine[Any, Any, T], give_up: Callable[[], None]) -> T:
    """Return the operation's result, or call `give_up` and raise `WireLost` when it takes longer than `seconds`.

    The connection is ended before the operation is cancelled: to a cancellation drivers react with requests of their
    own to a server that may not answer, and wait for it.
    """
    task = asyncio.ensure_future(operation)
    answered = False
    try:
        await asyncio.wait({task}, timeout=seconds)
        answered = task.done()
    finally:
        if not task.done():
            give_up()
            task.cancel()
            await asyncio.wait({task})
        if not answered and not task.cancelled():
            task.exception()  # of no interest any more
    if not answered:
        raise WireLost(f"the server has not answered within {seconds:g} s")
    return task.result()


class _Driver(Protocol):
    """What a driver's connection can do here."""

    errors: tuple[type[BaseException], ...]
    server_pid: int

    @property
    def lost(self) -> bool: ...

    async def listen(self, channel: str) -> None: ...
    async def unlisten(self, channel: str) -> None: ...
    async def ask(self, sql: str) -> Any: ...
    async def close(self) -> None: ...
    def terminate(self) -> None: ...


class _Asyncpg:
    """A connection of asyncpg, which calls back for each notification by itself."""

    def __init__(self, connection: Any, on_notify: Callable[[str, str], None], on_lost: Callable[[], None]) -> None:
        import asyncpg  # noqa: PLC0415  (the driver in use)

        self.errors: tuple[type[BaseException], ...] = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
        self.server_pid: int = connection.get_server_pid()
        self._connection = connection
        self._on_notify = on_notify
        self._on_lost = on_lost
        connection.add_termination_listener(self._terminated)

    @property
    def lost(self) -> bool:
        return bool(self._connection.is_closed())

    async def listen(self, channel: str) -> None:
        await self._connection.add_listener(channel, self._receive)

    async def unlisten(self, channel: str) -> None:
        await self._connection.remove_listener(channel, self._receive)

    async def ask(self, sql: str) -> Any:
        return await self._connection.fetchval(sql)

    async def close(self) -> None:
        await self._connection.close()

    def terminate(self) -> None:
        self._connection.terminate()

    def _receive(self, _connection: Any, _pid: int, channel: str, payload: str) -> None:
        self._on_notify(channel, payload)

    def _terminated(self, _connection: Any) -> None:
        self._on_lost()


class _Psycopg:
    """A connection of psycopg, at the level of libpq.

    psycopg's own generator of notifications keeps the connection to itself while it waits, and reacts to a
    cancellation by asking the server. So the socket is watched here, and answers are taken as they come.
    """

    def __init__(self, connection: Any, on_notify: Callable[[str, str], None], on_lost: Callable[[], None]) -> None:
        import psycopg  # noqa: PLC0415  (the driver in use)

        self.errors: tuple[type[BaseException], ...] = (psycopg.Error, OSError)
        self._error_of: Callable[[Any], Exception] = psycopg.errors.error_from_result
        self._connection = connection
        self._libpq = connection.pgconn
        self._encoding: str = connection.info.encoding
        self.server_pid: int = self._libpq.backend_pid
        self._on_notify = on_notify
        self._on_lost = on_lost
        self._answer: asyncio.Future[Any] | None = None
        self._value: Any = None
        self._error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        socket: int = self._libpq.socket
        self._socket: int | None = socket
        self._loop.add_reader(socket, self._read)

    @property
    def lost(self) -> bool:
        return self._socket is None

    async def listen(self, channel: str) -> None:
        await self.ask(f"LISTEN {quote_channel(channel)}")

    async def unlisten(self, channel: str) -> None:
        await self.ask(f"UNLISTEN {quote_channel(channel)}")

    async def ask(self, sql: str) -> Any:
        self._answer, self._value, self._error = self._loop.create_future(), None, None
        self._libpq.send_query(sql.encode(self._encoding))
        if self._libpq.flush():  # a statement here is shorter than any socket's buffer, unless nobody empties it
            raise ConnectionError("the socket takes no more")
        return await self._answer

    async def close(self) -> None:
        self.terminate()  # which says goodbye too

    def terminate(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket = None
            self._libpq.finish()

    def _read(self) -> None:
        """Take what has arrived: notifications, and the answer to the statement under way."""
        try:
            self._libpq.consume_input()
            self._take_answer()
            while notification := self._libpq.notifies():
                self._on_notify(
                    notification.relname.decode(self._encoding, "replace"),
                    notification.extra.decode(self._encoding, "replace"),
                )
        except self.errors as error:
            self.terminate()
            if self._answer is not None and not self._answer.done():
                self._answer.set_exception(error)
            self._on_lost()

    def _take_answer(self) -> None:
        while self._answer is not None and not self._libpq.is_busy():
            result = self._libpq.get_result()
            if result is None:
                answer, self._answer = self._answer, None
                if not answer.done():
                    answer.set_exception(self._error) if self._error else answer.set_result(self._value)
            elif result.error_message:
                self._error = self._error_of(result)
            elif result.ntuples:
                self._value = result.get_value(0, 0)


DRIVERS: Final[dict[str, Callable[..., _Driver]]] = {
    "asyncpg": _Asyncpg,
    "psycopg": _Psycopg,
    "psycopg_async": _Psycopg,
}
