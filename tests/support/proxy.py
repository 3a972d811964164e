"""A TCP proxy on the loopback address that behaves as bad networks do: it goes silent, or refuses everybody."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy import make_url

from support.databases import Database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNK: Final = 2**16


class Proxy:
    """Forwards connections to one server. It lives on the event loop of the test."""

    def __init__(self, database: Database) -> None:
        self._url = make_url(database.dsn)
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], asyncio.Event] = {}
        self._swallows = False
        self._refuses = False
        self.taken = 0
        """How many connections have come so far."""

    @property
    def database(self) -> Database:
        """The database, by way of this proxy."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        return Database(self._url.set(host="127.0.0.1", port=port).render_as_string(hide_password=False))

    def silence(self) -> None:
        """Forward nothing more on the connections there are, in either direction, and leave them open.

        Those that come later are forwarded: so it looks when a firewall in between has forgotten a connection.
        """
        for flowing in self._links.values():
            flowing.clear()

    def swallow(self) -> None:
        """Go silent on the connections that come later too, until `recover`."""
        self.silence()
        self._swallows = True

    def refuse(self) -> None:
        """Close all connections, and each that comes later at once, until `recover`."""
        self._refuses = True
        for link in self._links:
            link.cancel()

    def recover(self) -> None:
        """Forward the connections that come from now on; the silent ones stay silent."""
        self._swallows = self._refuses = False

    async def open(self) -> None:
        """Begin to take connections."""
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)

    async def close(self) -> None:
        """Close everything."""
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        await self._server.wait_closed()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        flowing = asyncio.Event()
        if not self._swallows:
            flowing.set()
        link = asyncio.current_task()
        assert link is not None
        self._links[link] = flowing
        try:
            if not self._refuses:
                await self._forward(reader, writer, flowing)
        except (asyncio.CancelledError, OSError):
            pass  # the proxy's own doing, or the end of either side
        finally:
            del self._links[link]
            await _hang_up(writer)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event
    ) -> None:
        there, to_there = await asyncio.open_connection(self._url.host, self._url.port or 5432)
        pumps = {
            asyncio.ensure_future(_pump(reader, to_there, flowing)),
            asyncio.ensure_future(_pump(there, writer, flowing)),
        }
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            await _hang_up(to_there)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
    while data := await reader.read(CHUNK):
        await flowing.wait()
        writer.write(data)
        await writer.drain()
    await flowing.wait()  # a silent network does not tell either that one side has gone


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def proxied(database: Database) -> AsyncIterator[Proxy]:
    """Yield a proxy to the server of `database`."""
    proxy = Proxy(database)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
