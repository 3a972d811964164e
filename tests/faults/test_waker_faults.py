"""What a wake that cannot be sent costs: a late look, never a commit, never the wakes after it."""

from __future__ import annotations

import asyncio
import select
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import NullPool, event, make_url
from support.databases import Database
from support.plain_sql import count
from support.sessions import DOORS, Door, done, open_door
from support.waiting import DEADLINE, until
from support.wakes import Ear, holding, interfering, listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.rows import Sql

    from alkstore_sa.embedded import LocalServer

CLOSES_WITHIN = 6.0
"""The listening connection, the task and the thread have 2 seconds each."""


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door
        await done(door.store.close())


@pytest.fixture
def ear(database: Database) -> Iterator[Ear]:
    with listening(database) as ear:
        yield ear


async def commit_one(door: Door, store: Any = None, engine: Any = None, *, queue: str = "emails") -> None:
    """Commit a transaction of its own that carries one job."""
    session = door.session(engine or door.engine)
    (store or door.store).queue(queue).enqueue_tx(session, 1)
    await done(session.commit())
    await done(session.close())


async def closing_time(store: Any) -> float:
    """Close the store, and return how long that took."""
    begin = time.monotonic()
    await done(store.close())
    return time.monotonic() - begin


@contextmanager
def connecting(engine: Any, before_each: Callable[[], None]) -> Iterator[None]:
    """Have `before_each` called when the thread that sends wakes is about to open a connection."""

    def do_connect(*_: Any) -> None:
        if threading.current_thread().name == "alkstore-waker":
            before_each()

    event.listen(engine, "do_connect", do_connect)
    try:
        yield
    finally:
        event.remove(engine, "do_connect", do_connect)


class Proxy:
    """Stands between a client and a server, until it goes silent: it takes what is sent, and nothing comes back."""

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._silent = threading.Event()
        self._ended = threading.Event()
        self._entrance = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._entrance.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def fall_silent(self) -> None:
        self._silent.set()

    def recover(self) -> None:
        """Break off what has been silent, and serve new connections."""
        self._silent.clear()

    def end(self) -> None:
        self._ended.set()
        for thread in list(self._threads):
            thread.join()
        self._entrance.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if select.select([self._entrance], [], [], 0.05)[0]:
                client, _ = self._entrance.accept()
                thread = threading.Thread(target=self._forward, args=[client])
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server:
            while not self._ended.is_set():
                for readable in select.select([client, server], [], [], 0.05)[0]:
                    if self._silent.is_set():
                        while self._silent.is_set() and not self._ended.wait(0.01):
                            pass
                        return
                    with suppress(OSError):
                        data = readable.recv(65536)
                        if not data:
                            return
                        (server if readable is client else client).sendall(data)


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    url = make_url(database.dsn)
    proxy = Proxy(url.host or "localhost", url.port or 5432)
    yield proxy
    proxy.end()


# -- a wake that fails -------------------------------------------------------------------------------------------------


async def test_a_wake_that_fails_is_logged_and_neither_its_commit_nor_the_next_wake_fails(
    door: Door, ear: Ear, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("no wakes today")

    with interfering(door.sync_engine(), fail) as interference:
        await commit_one(door)
        await done(door.store.queue("emails").enqueue(1))
        await done(door.store.close())
        assert interference.attempts
    assert count(sql) == 2
    assert {(record.name, record.levelname) for record in caplog.records} == {("alkstore_sa.waker", "WARNING")}
    assert "no wakes today" in caplog.text
    await commit_one(door, queue="letters")
    await done(door.store.close())
    assert ear.heard() == ["queue letters"]


async def test_a_wake_that_fails_in_passing_is_tried_again(
    door: Door, ear: Ear, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [ConnectionResetError("reset by peer"), TimeoutError("no route")]

    def fail(_: Any) -> None:
        if failures:
            raise failures.pop()

    with interfering(door.sync_engine(), fail) as interference:
        await commit_one(door)
        await until(ear.hears("queue emails"))
    assert interference.attempts == 3
    assert not caplog.records


async def test_a_wake_whose_connection_the_server_ends_goes_over_another(door: Door, ear: Ear, sql: Sql) -> None:
    with holding(door.sync_engine()) as hold:
        await commit_one(door)
        await until(lambda: hold.backends)
        sql.execute("SELECT pg_terminate_backend(%s)", [hold.backends[0]])
        hold.release()
        await until(ear.hears("queue emails"))
    await commit_one(door, queue="letters")
    await until(ear.hears("queue emails", "queue letters"))


async def test_a_wake_that_comes_while_the_one_before_it_fails_is_sent(door: Door, ear: Ear) -> None:
    failures = [RuntimeError("no wakes yet")]
    with holding(door.sync_engine()) as hold:

        def fail(_: Any) -> None:
            if failures:
                raise failures.pop()

        with interfering(door.sync_engine(), fail):
            await commit_one(door)
            await until(lambda: hold.attempts == 1)
            await commit_one(door, queue="letters")
            hold.release()
            await until(ear.hears("queue letters"))


async def test_without_a_pool_too_a_wake_that_comes_while_the_one_before_it_fails_is_sent(
    door: Door, ear: Ear, caplog: pytest.LogCaptureFixture
) -> None:
    engine = door.new_engine(poolclass=NullPool)
    store = door.new_store(engine)
    failing, let_go = threading.Event(), threading.Event()

    def fail() -> None:
        if not failing.is_set():
            failing.set()
            let_go.wait(20)
            raise RuntimeError("no wakes yet")

    with connecting(door.sync_engine(engine), fail):
        await commit_one(door, store, engine)
        await until(failing.is_set)
        await commit_one(door, store, engine, queue="letters")
        let_go.set()
        await until(ear.hears("queue letters"))
    await done(store.close())
    assert "no wakes yet" in caplog.text


async def test_without_a_pool_a_wake_that_fails_in_passing_is_tried_again(door: Door, ear: Ear) -> None:
    engine = door.new_engine(poolclass=NullPool)
    store = door.new_store(engine)
    failures = [ConnectionResetError("reset by peer")]

    def fail() -> None:
        if failures:
            raise failures.pop()

    with connecting(door.sync_engine(engine), fail):
        await commit_one(door, store, engine)
        await until(ear.hears("queue emails"))
    assert not failures
    await done(store.close())


# -- a server that is gone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DOORS)
async def test_wakes_go_on_after_a_server_was_killed_and_came_back(own_server: LocalServer, kind: str) -> None:
    database = Database(own_server.dsn)
    async with open_door(database, kind) as door:
        engine = door.new_engine(pool_pre_ping=True)
        store = door.new_store(engine)
        with listening(database) as ear:
            await commit_one(door, store, engine)
            await until(ear.hears("queue emails"))
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start_again)
        with listening(database) as ear:
            await commit_one(door, store, engine)
            await until(ear.hears("queue emails"))
            await done(store.queue("letters").enqueue(1))
            await until(ear.hears("queue emails", "queue letters"))
        await done(store.close())


@pytest.mark.parametrize("kind", DOORS)
async def test_a_server_that_dies_between_commit_and_wake_does_not_hold_closing_up(
    own_server: LocalServer, kind: str
) -> None:
    async with open_door(Database(own_server.dsn), kind) as door:
        with holding(door.sync_engine()) as hold:
            await commit_one(door)
            await until(lambda: hold.attempts)
            await asyncio.to_thread(own_server.kill)
            hold.release()
            assert await closing_time(door.store) < CLOSES_WITHIN
        await asyncio.to_thread(own_server.start_again)
        await done(door.store.close())  # a thread may be at it still


@pytest.mark.parametrize("poolclass", [None, NullPool])
async def test_a_network_that_falls_silent_does_not_hold_closing_up(
    door: Door, database: Database, proxy: Proxy, poolclass: Any
) -> None:
    through_proxy = Database(make_url(database.dsn).set(host="127.0.0.1", port=proxy.port).render_as_string(False))
    async with open_door(database, door.kind) as near:
        near._database = through_proxy
        engine = near.new_engine(**({} if poolclass is None else {"poolclass": poolclass}))
        store = near.new_store(engine)
        connects, let_go = threading.Event(), threading.Event()

        def hold_connecting() -> None:
            connects.set()
            let_go.wait(DEADLINE)

        # Through the pool the wake falls silent when it is being sent, without one when its connection is being opened.
        with holding(near.sync_engine(engine)) as hold, connecting(near.sync_engine(engine), hold_connecting):
            await commit_one(near, store, engine)
            await until(lambda: hold.attempts or connects.is_set())
            proxy.fall_silent()
            hold.release()
            let_go.set()
            assert await closing_time(store) < CLOSES_WITHIN
        proxy.recover()
        await done(store.close())  # a thread may be at it still
