"""Hearing the engine's wakes as another client does, and interfering with those that are being sent."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import psycopg
from sqlalchemy import Engine, event
from sqlalchemy.util import await_only

from alkstore_sa._channels import wake_channel
from support.waiting import DEADLINE, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from alkstore_sa import Store
    from support.databases import Database

FENCE: Final = "fence"
IS_A_WAKE: Final = "pg_notify(wake.channel"


class Heard(NamedTuple):
    """A wake that has arrived: whose it is, and the token of the store that has sent it."""

    who: str
    token: str


class Ear:
    """A client that listens to wakes: by default to everybody's who is called `emails`, and to a neighbour's."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._names: dict[str, str] = {}
        self._fences = 0
        self.arrived: list[Heard] = []
        connection.add_notify_handler(self._take)
        connection.execute(f"LISTEN {FENCE}")
        self.listen("queue", "emails")
        self.listen("queue", "__alkstore_outbox:emails", "outbox emails")
        self.listen("stream", "emails")
        self.listen("queue", "letters")
        self.listen("queue", "emails", "queue emails of another schema", schema="other")

    def listen(
        self, kind: Literal["queue", "stream"], name: str, called: str = "", *, schema: str = "alkstore"
    ) -> None:
        """Listen to the wakes of a queue or stream too."""
        channel = wake_channel(schema, kind, name)
        self._names[channel] = called or f"{kind} {name}"
        self._connection.execute(f'LISTEN "{channel}"'.encode())

    def _take(self, notification: psycopg.Notify) -> None:
        if notification.channel == FENCE:
            self._fences -= 1
        else:
            self.arrived.append(Heard(self._names[notification.channel], notification.payload))

    def heard(self) -> list[str]:
        """Return whose wakes have been committed until now, in their order.

        The server delivers notifications in the order of their commits, so what was notified before the fence is here.
        """
        self._fences += 1
        self._connection.execute(f"NOTIFY {FENCE}")
        end = time.monotonic() + DEADLINE
        while self._fences:
            assert time.monotonic() < end, "the fence did not arrive"
            self._connection.execute("SELECT")
        return [heard.who for heard in self.arrived]

    def hears(self, *who: str) -> Callable[[], bool]:
        """Return a condition: exactly these wakes have been heard."""
        return lambda: self.heard() == list(who)

    def forget(self) -> None:
        """Forget what was heard until now."""
        self.heard()
        self.arrived.clear()


@contextmanager
def listening(database: Database) -> Iterator[Ear]:
    """Yield an ear on `database`."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        yield Ear(connection)


class Interference:
    """What happens to wakes in the moment before they are sent through an engine, and how many there were."""

    def __init__(self, before_each: Callable[[Any], None]) -> None:
        self.attempts = 0
        self._before_each = before_each

    def __call__(self, connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if IS_A_WAKE in statement:
            self.attempts += 1
            self._before_each(connection)


@contextmanager
def interfering(engine: Engine, before_each: Callable[[Any], None] = lambda _: None) -> Iterator[Interference]:
    """Have `before_each` called with the connection on which a wake is about to be sent."""
    interference = Interference(before_each)
    event.listen(engine, "before_cursor_execute", interference)
    try:
        yield interference
    finally:
        event.remove(engine, "before_cursor_execute", interference)


class Hold(Interference):
    """Holds wakes up until it is let go."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(self._hold)
        self._is_async = engine.dialect.is_async
        self._released = threading.Event()
        self.backends: list[int] = []

    def _hold(self, connection: Any) -> None:
        driver = connection.connection.driver_connection
        self.backends.append(driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid)
        if self._is_async:
            await_only(until(self._released.is_set))
        else:
            self._released.wait(DEADLINE)

    def release(self) -> None:
        """Let all wakes pass, from now on."""
        self._released.set()


@contextmanager
def holding(engine: Engine) -> Iterator[Hold]:
    """Hold up the wakes that go through an engine, for the time of the block at most."""
    hold = Hold(engine)
    event.listen(engine, "before_cursor_execute", hold)
    try:
        yield hold
    finally:
        hold.release()
        event.remove(engine, "before_cursor_execute", hold)


def is_asleep(store: Store, kind: Literal["queue", "stream"], name: str) -> Callable[[], bool]:
    """Return a condition: who consumes here has looked, hears the wakes of other processes, and sleeps."""
    channel = wake_channel("alkstore", kind, name)

    def condition() -> bool:
        sinks: tuple[Any, ...] = store._core.hub.on(channel)
        heard = channel in store._listener._listening
        return heard and bool(sinks) and all(sink._event._waiters and not sink.woken for sink in sinks)

    return condition
