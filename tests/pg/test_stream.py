"""Publishing to streams, reading them, consumers' offsets, and trimming."""

from __future__ import annotations

import inspect as python_inspect
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import inspect, select
from support.plain_sql import count, number
from support.sessions import DOORS, Door, begun, done, open_door

from alkstore_sa import InvalidName, PayloadError, PayloadTooLarge, ReservedName, StreamEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.databases import Database
    from support.rows import Sql

BAD_NAMES: list[tuple[Any, type[Exception]]] = [
    *(("", InvalidName), ("x" * 201, InvalidName), ("a\0b", InvalidName), ("\ud800", InvalidName), (7, InvalidName)),
    *((None, InvalidName), ("__alkstore_s", ReservedName)),
]
ODD_NAMES = ["o'rders", 'a"b', "a b", "a.b", "%s", "100%", ":name", "$1", "ü€\N{GRINNING FACE}", "x" * 200, " "]


@dataclass
class Mail:
    to: str


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, database: Database) -> AsyncIterator[Door]:
    async with open_door(database, request.param) as door:
        yield door


@pytest.fixture
def other(database: Database) -> Iterator[Sql]:
    """A connection whose transactions are its own, to get in the way with."""
    with psycopg.connect(database.dsn) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def stream(door: Door) -> Any:
    return door.store.stream("s")


def payloads(events: list[Any]) -> list[Any]:
    return [event.payload for event in events]


def offsets(events: list[Any]) -> list[int]:
    return [event.offset for event in events]


def stored(sql: Sql) -> int:
    return count(sql, "stream_event")


def fail_rather_than_wait(sql: Sql) -> None:
    """Let connections that are opened from now on wait for no lock longer than a few seconds."""
    name = psycopg.sql.Identifier(sql.info.dbname)
    sql.execute(psycopg.sql.SQL("ALTER DATABASE {} SET lock_timeout = '5s'").format(name))


# -- publish and read --------------------------------------------------------------------------------------------------


async def test_what_was_published_is_read_at_once(stream: Any) -> None:
    for place in range(1, 4):
        await done(stream.publish({"n": place}))
        assert payloads(await done(stream.read(after=place - 1))) == [{"n": place}]


async def test_an_event_has_its_id_its_place_its_key_and_its_time(stream: Any, sql: Sql) -> None:
    event_id = await done(stream.publish("x", key="customer 7"))
    await done(stream.publish("y"))
    event, without = await done(stream.read())
    assert (event.id, event.stream, event.offset, event.key, event.payload) == (event_id, "s", 1, "customer 7", "x")
    assert without.key is None
    row = sql.execute("SELECT created_at FROM alkstore.stream_event ORDER BY id").fetchone()
    assert row == (event.created_at,)
    assert event.created_at.tzinfo is not None


async def test_a_stream_nobody_has_published_to_is_empty(stream: Any, sql: Sql) -> None:
    assert await done(stream.read()) == []
    assert await done(stream.head()) == 0
    assert count(sql, "stream") == 0


async def test_read_stops_at_its_limit_and_goes_on_behind_an_offset(stream: Any) -> None:
    await done(stream.publish_many(range(25)))
    assert payloads(await done(stream.read(limit=10))) == list(range(10))
    assert payloads(await done(stream.read(10, 10))) == list(range(10, 20))
    assert payloads(await done(stream.read(20, 10))) == list(range(20, 25))
    assert await done(stream.read(25, 10)) == []
    assert await done(stream.read(2**63 - 1, 10)) == []


async def test_read_gives_a_hundred_events_from_the_beginning_unless_told_otherwise(stream: Any) -> None:
    await done(stream.publish_many(range(150)))
    assert payloads(await done(stream.read())) == list(range(100))


async def test_fewer_events_than_asked_for_are_all_that_there_are(stream: Any) -> None:
    # Those that have places, and more new ones than one statement places.
    await done(stream.publish_many(range(10)))
    assert len(await done(stream.read())) == 10
    await done(stream.publish_many(range(10, 2510)))
    assert payloads(await done(stream.read(limit=5000))) == list(range(2510))
    await done(stream.publish_many(range(2510, 6000)))
    assert offsets(await done(stream.read(after=5, limit=5995))) == list(range(6, 6001))


async def test_new_events_are_read_in_full_around_the_number_that_one_statement_places(door: Door) -> None:
    for new in (999, 1000, 1001, 2000):
        stream = door.store.stream(f"{new}")
        await done(stream.publish_many(range(new)))
        assert len(await done(stream.read(limit=10_000))) == new
        assert await done(stream.head()) == new


async def test_a_reader_far_behind_the_end_waits_for_no_event(stream: Any) -> None:
    await done(stream.publish_many(range(1500)))
    assert await done(stream.read(after=1_000_000)) == []
    assert payloads(await done(stream.read(after=1499))) == [1499]


async def test_a_small_page_of_many_new_events_has_the_first_of_them(stream: Any) -> None:
    await done(stream.publish_many(range(2500)))
    assert payloads(await done(stream.read(limit=3))) == [0, 1, 2]
    assert payloads(await done(stream.read(after=2497))) == [2497, 2498, 2499]


async def test_head_is_the_last_events_offset_whoever_has_read_it(stream: Any) -> None:
    await done(stream.publish_many(range(1234)))
    assert await done(stream.head()) == 1234
    await done(stream.publish("x"))
    assert await done(stream.head()) == 1235
    assert payloads(await done(stream.read(after=1234))) == ["x"]


async def test_publish_many_of_tens_of_thousands_keeps_the_order(stream: Any) -> None:
    ids = await done(stream.publish_many(range(50_000)))
    assert ids == sorted(set(ids))
    assert len(ids) == 50_000
    events = await done(stream.read(limit=50_000))
    assert payloads(events) == list(range(50_000))
    assert [event.id for event in events] == ids


async def test_publish_many_takes_any_iterable_and_one_key_for_all(stream: Any) -> None:
    assert await done(stream.publish_many([])) == []
    await done(stream.publish_many((letter for letter in "abc"), key="k"))
    events = await done(stream.read())
    assert [(event.payload, event.key) for event in events] == [("a", "k"), ("b", "k"), ("c", "k")]


async def test_streams_are_counted_each_by_itself(door: Door) -> None:
    one, another = door.store.stream("one"), door.store.stream("another")
    for _ in range(3):
        await done(one.publish("x"))
        await done(another.publish("y"))
    assert [(event.offset, event.payload) for event in await done(one.read())] == [(1, "x"), (2, "x"), (3, "x")]
    assert [(event.offset, event.payload) for event in await done(another.read())] == [(1, "y"), (2, "y"), (3, "y")]


async def test_events_inserted_by_plain_sql_are_events(stream: Any, sql: Sql) -> None:
    sql.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '{\"n\": 1}')")
    assert payloads(await done(stream.read())) == [{"n": 1}]


# -- within the caller's transaction -----------------------------------------------------------------------------------


async def test_publish_tx_only_adds_to_the_unit_of_work(door: Door, stream: Any) -> None:
    session = door.session()
    sent = door.statements()
    event = stream.publish_tx(session, "x", key="k")
    assert not python_inspect.isawaitable(event)
    assert isinstance(event, door.store.models.StreamEvent)
    assert inspect(event).pending
    assert sent == []
    assert door.sync_engine().pool.checkedout() == 0


async def test_the_id_is_there_after_the_flush_and_stays_after_the_commit(door: Door, stream: Any) -> None:
    session = door.session()
    event = stream.publish_tx(session, "x")
    assert event.id is None
    await done(session.flush())
    flushed = event.id
    await done(session.commit())
    sent = door.statements()
    assert event.id == flushed
    assert sent == []
    (read,) = await done(stream.read())
    assert (read.id, read.key) == (flushed, None)


async def test_an_event_is_there_after_the_commit_and_not_before(door: Door, stream: Any) -> None:
    session = door.session()
    stream.publish_tx(session, {"n": 1}, key="k")
    await done(session.flush())
    assert await done(stream.read()) == []
    assert await done(stream.head()) == 0
    await done(session.commit())
    (event,) = await done(stream.read())
    assert (event.offset, event.payload, event.key) == (1, {"n": 1}, "k")


async def test_publish_many_tx_keeps_the_order(door: Door, stream: Any) -> None:
    session = door.session()
    events = stream.publish_many_tx(session, range(200), key="k")
    await done(session.commit())
    read = await done(stream.read(limit=1000))
    assert payloads(read) == list(range(200))
    assert [event.id for event in read] == [event.id for event in events]


async def test_a_rolled_back_event_never_shows(door: Door, stream: Any) -> None:
    session = door.session()
    stream.publish_tx(session, "undone")
    await done(session.flush())
    await done(session.rollback())
    await done(stream.publish("kept"))
    assert [(event.offset, event.payload) for event in await done(stream.read())] == [(1, "kept")]


async def test_an_event_of_a_rolled_back_savepoint_never_shows(door: Door, stream: Any) -> None:
    session = door.session()
    stream.publish_tx(session, "before")
    savepoint = await done(session.begin_nested())
    stream.publish_tx(session, "undone")
    await done(session.flush())
    await done(savepoint.rollback())
    savepoint = await done(session.begin_nested())
    stream.publish_tx(session, "after")
    await done(savepoint.commit())
    await done(session.commit())
    assert payloads(await done(stream.read())) == ["before", "after"]


async def test_a_session_sees_its_own_event_without_a_place(door: Door, stream: Any) -> None:
    async with begun(door.store) as session:
        stream.publish_tx(session, "x")
        (row,) = (await done(session.scalars(select(StreamEvent)))).all()
        assert (row.payload, row.offset) == ("x", None)


async def test_a_store_on_a_connection_publishes_and_reads_within_its_transaction(door: Door, sql: Sql) -> None:
    connection = await door.connect()
    transaction = await done(connection.begin())
    stream = door.new_store(connection).stream("s")
    await done(stream.publish_many(range(1500)))
    assert payloads(await done(stream.read(limit=2000))) == list(range(1500))
    await done(transaction.rollback())
    assert (stored(sql), count(sql, "stream")) == (0, 0)


# -- payloads ----------------------------------------------------------------------------------------------------------


async def test_a_payload_comes_back_as_the_streams_type(door: Door) -> None:
    stream = door.store.stream("s", payload_type=Mail)
    await done(stream.publish(Mail("you")))
    (event,) = await done(stream.read())
    assert event.payload == Mail("you")
    assert event.decode(dict) == {"to": "you"}


async def test_a_payload_that_does_not_fit_raises_only_when_it_is_looked_at(door: Door) -> None:
    await done(door.store.stream("s").publish_many([{"to": "you"}, {"wrong": 1}, {"to": "me"}]))
    first, wrong, last = await done(door.store.stream("s", payload_type=Mail).read())
    assert (first.payload, last.payload) == (Mail("you"), Mail("me"))
    assert wrong.offset == 2
    with pytest.raises(PayloadError):
        _ = wrong.payload
    assert wrong.decode(dict) == {"wrong": 1}


async def test_an_undecodable_payload_stops_nobody(stream: Any, sql: Sql) -> None:
    await done(stream.publish("before"))
    sql.execute("INSERT INTO alkstore.stream_event (stream, payload) VALUES ('s', '1e5000')")
    await done(stream.publish("after"))
    before, bad, after = await done(stream.read())
    assert (before.payload, after.payload) == ("before", "after")
    with pytest.raises(PayloadError):
        _ = bad.payload


async def test_any_json_value_comes_back_through_every_way_of_publishing(door: Door, stream: Any) -> None:
    values: list[Any] = [None, 0, "", [], {}, "ü€\N{GRINNING FACE}", "null", 10**400, [[{"a": None}]]]
    session = door.session()
    stream.publish_many_tx(session, values)
    await done(session.commit())
    await done(stream.publish_many(values))
    for value in values:
        await done(stream.publish(value))
    assert payloads(await done(stream.read())) == values * 3


BAD_ARGUMENTS: dict[str, tuple[type[Exception], Callable[[Any, Any], Any]]] = {
    "not JSON": (PayloadError, lambda stream, _: stream.publish({object()})),
    "NaN": (PayloadError, lambda stream, _: stream.publish(float("nan"))),
    "a NUL": (PayloadError, lambda stream, _: stream.publish("a\0b")),
    "one of many": (PayloadError, lambda stream, _: stream.publish_many([1, {object()}, 3])),
    "not JSON in a session": (PayloadError, lambda stream, session: stream.publish_tx(session, {object()})),
    "one of many in a session": (
        PayloadError,
        lambda stream, session: stream.publish_many_tx(session, [1, {object()}]),
    ),
    "key with a NUL": (ValueError, lambda stream, _: stream.publish(1, key="a\0b")),
    "key of another type": (ValueError, lambda stream, _: stream.publish(1, key=7)),
    "key with a lone surrogate": (ValueError, lambda stream, session: stream.publish_tx(session, 1, key="\ud800")),
    "negative offset to read from": (ValueError, lambda stream, _: stream.read(-1)),
    "offset beyond all": (ValueError, lambda stream, _: stream.read(2**63)),
    "offset of another type": (ValueError, lambda stream, _: stream.read("1")),
    "no limit": (ValueError, lambda stream, _: stream.read(0, 0)),
    "limit of another type": (ValueError, lambda stream, _: stream.read(0, True)),
    "negative offset to save": (ValueError, lambda stream, _: stream.save_offset("c", -1)),
    "offset to save of another type": (ValueError, lambda stream, session: stream.save_offset_tx(session, "c", 1.5)),
    "consumer without a name": (InvalidName, lambda stream, _: stream.save_offset("", 1)),
    "consumer with a reserved name": (ReservedName, lambda stream, _: stream.get_offset("__alkstore_c")),
    "consumer with a long name": (InvalidName, lambda stream, _: stream.forget("c" * 201)),
    "consumer in a session": (InvalidName, lambda stream, session: stream.save_offset_tx(session, "a\0b", 1)),
    "trim of nothing": (ValueError, lambda stream, _: stream.trim()),
    "trim with a negative age": (ValueError, lambda stream, _: stream.trim(older_than=-1)),
    "trim with a negative number": (ValueError, lambda stream, _: stream.trim(keep=-1)),
    "trim with a number of another type": (ValueError, lambda stream, _: stream.trim(keep=1.5)),
}


async def test_bad_arguments_are_refused_before_any_round_trip(door: Door, stream: Any, sql: Sql) -> None:
    session = door.session()
    # To join a session takes the session's connection, to look at what it is told does not.
    await done(session.connection())
    sent = door.statements()
    for what, (error, call) in BAD_ARGUMENTS.items():
        try:
            await done(call(stream, session))
        except error:
            continue
        pytest.fail(f"{what} was taken")
    assert sent == []
    await done(session.commit())
    assert (stored(sql), count(sql, "stream_offset")) == (0, 0)


async def test_a_payload_over_the_size_limit_is_refused(door: Door, sql: Sql) -> None:
    store = door.new_store(door.engine, max_payload_bytes=20)
    stream = store.stream("s")
    session = door.session()
    with pytest.raises(PayloadTooLarge):
        await done(stream.publish("x" * 30))
    with pytest.raises(PayloadTooLarge):
        stream.publish_tx(session, "x" * 30)
    await done(session.commit())
    assert stored(sql) == 0
    await done(store.close())


# -- names -------------------------------------------------------------------------------------------------------------


async def test_bad_stream_names_are_refused(door: Door) -> None:
    for name, error in BAD_NAMES:
        with pytest.raises(error):
            door.store.stream(name)


async def test_any_ordinary_text_names_a_stream_and_a_consumer(door: Door) -> None:
    for name in ODD_NAMES:
        stream = door.store.stream(name)
        assert stream.name == name
        await done(stream.publish("x", key=name))
        (event,) = await done(stream.read())
        assert (event.stream, event.offset, event.key) == (name, 1, name)
        assert await done(stream.save_offset(name, 1)) is True
        assert await done(stream.get_offset(name)) == 1
        assert await done(stream.trim(keep=0)) == 1


# -- consumers' offsets ------------------------------------------------------------------------------------------------


async def test_a_consumer_nobody_knows_is_at_the_beginning(stream: Any, sql: Sql) -> None:
    assert await done(stream.get_offset("c")) == 0
    assert count(sql, "stream_offset") == 0


async def test_an_offset_never_goes_backwards(stream: Any) -> None:
    assert await done(stream.save_offset("c", 5)) is True
    assert await done(stream.save_offset("c", 4)) is False
    assert await done(stream.save_offset("c", 5)) is False
    assert await done(stream.save_offset("c", 0)) is False
    assert await done(stream.get_offset("c")) == 5
    assert await done(stream.save_offset("c", 6)) is True
    assert await done(stream.get_offset("c")) == 6


async def test_offsets_belong_to_one_consumer_of_one_stream(door: Door) -> None:
    one, another = door.store.stream("one"), door.store.stream("another")
    await done(one.save_offset("c", 5))
    await done(one.save_offset("d", 7))
    assert await done(one.get_offset("c")) == 5
    assert await done(one.get_offset("d")) == 7
    assert await done(another.get_offset("c")) == 0


async def test_an_offset_saved_in_a_session_commits_with_it(door: Door, stream: Any) -> None:
    session = door.session()
    assert await done(stream.save_offset_tx(session, "c", 5)) is True
    assert await done(stream.get_offset("c")) == 0
    await done(session.commit())
    assert await done(stream.get_offset("c")) == 5
    assert await done(stream.save_offset_tx(session, "c", 5)) is False
    assert await done(stream.save_offset_tx(session, "c", 3)) is False
    await done(session.commit())
    assert await done(stream.get_offset("c")) == 5


async def test_an_offset_saved_in_a_session_is_rolled_back_with_it(door: Door, stream: Any) -> None:
    await done(stream.save_offset("c", 2))
    session = door.session()
    await done(stream.save_offset_tx(session, "c", 5))
    await done(session.rollback())
    assert await done(stream.get_offset("c")) == 2


async def test_an_offset_saved_in_a_savepoint_is_rolled_back_with_it(door: Door, stream: Any) -> None:
    session = door.session()
    await done(stream.save_offset_tx(session, "c", 1))
    savepoint = await done(session.begin_nested())
    assert await done(stream.save_offset_tx(session, "c", 5)) is True
    await done(savepoint.rollback())
    assert await done(stream.save_offset_tx(session, "c", 3)) is True
    await done(session.commit())
    assert await done(stream.get_offset("c")) == 3


async def test_save_offset_tx_answers_a_sync_session_at_once_and_an_async_one_when_awaited(
    door: Door, stream: Any
) -> None:
    answer = stream.save_offset_tx(door.session(), "c", 1)
    assert python_inspect.isawaitable(answer) == door.is_async
    assert await done(answer) is True


async def test_a_forgotten_consumer_begins_anew(stream: Any) -> None:
    await done(stream.save_offset("c", 5))
    await done(stream.save_offset("d", 5))
    assert await done(stream.forget("c")) is True
    assert await done(stream.forget("c")) is False
    assert await done(stream.get_offset("c")) == 0
    assert await done(stream.get_offset("d")) == 5
    assert await done(stream.save_offset("c", 1)) is True


# -- trim --------------------------------------------------------------------------------------------------------------


def age(sql: Sql, *places: int) -> None:
    """Let the events at these offsets have been published an hour ago."""
    moved = sql.execute(
        "UPDATE alkstore.stream_event SET created_at = statement_timestamp() - interval '1 hour'"
        ' WHERE "offset" = ANY (%s)',
        [list(places)],
    )
    assert moved.rowcount == len(places)


async def filled(stream: Any, events: int = 10) -> Any:
    """Publish events and read them all."""
    await done(stream.publish_many(range(1, events + 1)))
    assert len(await done(stream.read(limit=events))) == events
    return stream


async def test_trim_keeps_the_newest_events(stream: Any) -> None:
    await filled(stream)
    assert await done(stream.trim(keep=3)) == 7
    assert offsets(await done(stream.read())) == [8, 9, 10]
    assert await done(stream.trim(keep=3)) == 0
    assert await done(stream.trim(keep=100)) == 0


async def test_trim_deletes_what_is_older(stream: Any, sql: Sql) -> None:
    await filled(stream)
    age(sql, 1, 2, 3, 4)
    assert await done(stream.trim(older_than=timedelta(hours=2))) == 0
    assert await done(stream.trim(older_than=timedelta(minutes=30))) == 4
    assert offsets(await done(stream.read())) == [5, 6, 7, 8, 9, 10]


async def test_trim_stops_before_the_first_event_that_is_younger(stream: Any, sql: Sql) -> None:
    await filled(stream)
    age(sql, 1, 2, 4, 5)
    assert await done(stream.trim(older_than=60)) == 2
    assert offsets(await done(stream.read())) == [3, 4, 5, 6, 7, 8, 9, 10]


async def test_trim_with_both_rules_needs_both_to_allow_it(stream: Any, sql: Sql) -> None:
    await filled(stream)
    age(sql, 1, 2, 3, 4)
    assert await done(stream.trim(older_than=60, keep=8)) == 2
    assert await done(stream.trim(older_than=60, keep=1)) == 2
    assert offsets(await done(stream.read())) == [5, 6, 7, 8, 9, 10]


async def test_trim_goes_on_in_portions(stream: Any, sql: Sql) -> None:
    await filled(stream, 2500)
    assert await done(stream.trim(keep=1)) == 2499
    assert offsets(await done(stream.read())) == [2500]
    assert stored(sql) == 1


async def test_trim_with_an_age_goes_on_in_portions(stream: Any, sql: Sql) -> None:
    await filled(stream, 2500)
    age(sql, *range(1, 2300))
    assert await done(stream.trim(older_than=60)) == 2299
    assert offsets(await done(stream.read()))[0] == 2300


async def test_trim_deletes_nothing_that_a_known_consumer_has_not_come_to(stream: Any) -> None:
    await filled(stream)
    await done(stream.save_offset("slow", 4))
    await done(stream.save_offset("fast", 9))
    assert await done(stream.trim(keep=0)) == 4
    assert await done(stream.trim(older_than=0)) == 0
    assert offsets(await done(stream.read()))[0] == 5
    await done(stream.forget("slow"))
    assert await done(stream.trim(keep=0)) == 5
    assert offsets(await done(stream.read())) == [10]


async def test_a_consumer_at_the_beginning_keeps_everything(stream: Any) -> None:
    await filled(stream)
    await done(stream.save_offset("new", 0))
    assert await done(stream.trim(keep=0)) == 0
    assert len(await done(stream.read())) == 10


async def test_trim_leaves_events_without_a_place_alone(stream: Any, sql: Sql) -> None:
    await filled(stream)
    await done(stream.publish_many(["new", "newer"]))
    assert await done(stream.trim(keep=0)) == 10
    assert stored(sql) == 2
    assert [(event.offset, event.payload) for event in await done(stream.read())] == [(11, "new"), (12, "newer")]


async def test_trim_of_a_stream_that_nobody_has_read_deletes_nothing(stream: Any, sql: Sql) -> None:
    await done(stream.publish_many(range(5)))
    assert await done(stream.trim(keep=0)) == 0
    assert await done(stream.trim(older_than=0)) == 0
    assert stored(sql) == 5


async def test_trim_leaves_other_streams_and_their_consumers_out_of_it(door: Door) -> None:
    one, another = await filled(door.store.stream("one")), await filled(door.store.stream("another"))
    await done(another.save_offset("slow", 1))
    assert await done(one.trim(keep=0)) == 10
    assert len(await done(another.read())) == 10


async def test_offsets_go_on_counting_after_everything_was_trimmed(stream: Any) -> None:
    await filled(stream)
    assert await done(stream.trim(keep=0)) == 10
    assert await done(stream.read()) == []
    assert await done(stream.head()) == 10
    await done(stream.publish("x"))
    assert [(event.offset, event.payload) for event in await done(stream.read())] == [(11, "x")]


async def test_trim_passes_over_an_event_that_another_transaction_has_locked(stream: Any, sql: Sql, other: Sql) -> None:
    fail_rather_than_wait(sql)
    await filled(stream)
    other.execute('SELECT FROM alkstore.stream_event WHERE "offset" IN (2, 3) FOR UPDATE')
    assert await done(stream.trim(keep=5)) == 3
    assert offsets(await done(stream.read())) == [2, 3, 6, 7, 8, 9, 10]
    other.rollback()
    assert await done(stream.trim(keep=5)) == 2


async def test_readers_of_a_trimmed_stream_go_on_with_what_is_left(stream: Any) -> None:
    await filled(stream)
    await done(stream.trim(keep=4))
    assert offsets(await done(stream.read(after=2, limit=2))) == [7, 8]
    assert offsets(await done(stream.read(after=8, limit=10))) == [9, 10]


# -- handles -----------------------------------------------------------------------------------------------------------


async def test_a_handle_costs_no_round_trip_and_says_what_it_is(door: Door) -> None:
    sent = door.statements()
    stream = door.store.stream("s")
    assert repr(stream) == f"<{type(stream).__name__} 's' in schema 'alkstore'>"
    assert sent == []
    await done(stream.publish("x"))
    (event,) = await done(stream.read())
    assert repr(event) == "<Event 1 of 's'>"


async def test_a_sync_stream_has_all_of_a_stream_but_the_loop(door: Door) -> None:
    names = {name for name in dir(door.store.stream("s")) if not name.startswith("_")}
    assert names - {"subscribe"} == {
        *("name", "publish", "publish_many", "publish_tx", "publish_many_tx", "read", "head", "trim"),
        *("get_offset", "save_offset", "save_offset_tx", "forget"),
    }
    assert ("subscribe" in names) == door.is_async


async def test_an_empty_read_locks_nothing(stream: Any, sql: Sql, other: Sql) -> None:
    fail_rather_than_wait(sql)
    await filled(stream)
    other.execute("SELECT FROM alkstore.stream FOR UPDATE")
    assert await done(stream.read(after=10)) == []
    assert len(await done(stream.read(after=0))) == 10
    assert number(sql, "SELECT head FROM alkstore.stream") == 10
