from __future__ import annotations

import enum
import math
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sqlalchemy import func, literal, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from support.doors import DOORS, Door, driver_of, open_door
from support.rows import job_row

import alkstore_sa._insertion
from alkstore_sa import InvalidName, Job, JsonCodec, PayloadError, PayloadTooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from sqlalchemy.ext.asyncio import AsyncEngine
    from support.databases import Database
    from support.rows import Sql

    from alkstore_sa import Store

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)

SHAPES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, -0.0, "", "text", [], {}, [None], {"": None}, [[[]]], {"a": {"b": [{"c": {}}]}}),
    *(2**31, 2**53 + 1, 2**63, -(2**70), 10**400, 0.1, 1e-7, 1e22, 1e23, 1.7976931348623157e308, 5e-324),
    *(
        "null",
        "\\u0000",
        "\\\\u0000",
        "\\",
        '"',
        "'",
        "%s :x %(y)s {} $1",
        "\n\t\r\b\f\x01\x7f",
        "ü€\N{GRINNING FACE}\u2028",
    ),
    {"\\u0000": "\\u0000", "a.b": 1, "%": ":", "": [""], "é": "e\u0301"},
    [1, "1", 1.0, True, None, [1], {"1": 1}],
]

few = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@asynccontextmanager
async def opened(kind: str, database: Database, **options: Any) -> AsyncIterator[Door]:
    door = open_door(kind, database.url(driver_of(kind)), **options)
    try:
        yield door
    finally:
        await door.close()


@pytest.fixture(params=DOORS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def door(kind: str, database: Database) -> AsyncIterator[Door]:
    async with opened(kind, database) as door:
        yield door


def stored(sql: Sql) -> int:
    """Return how many jobs there are."""
    row = sql.execute("SELECT count(*) FROM alkstore.job").fetchone()
    assert row is not None
    return int(str(row[0]))


def same(back: Any, sent: Any) -> bool:
    """Compare JSON values as JSON does: a number by its value, which for a float is the float nearest to its digits."""
    if isinstance(sent, dict):
        return isinstance(back, dict) and back.keys() == sent.keys() and all(same(back[key], sent[key]) for key in sent)
    if isinstance(sent, list):
        return isinstance(back, list) and len(back) == len(sent) and all(map(same, back, sent))
    if isinstance(sent, float):
        return isinstance(back, (int, float)) and not isinstance(back, bool) and float(back) == sent
    return type(back) is type(sent) and bool(back == sent)


async def test_every_shape_of_json_comes_back_as_it_was(door: Door) -> None:
    await door.enqueue_many(SHAPES)
    jobs = await door.claim(100)
    assert len(jobs) == len(SHAPES)
    for job, shape in zip(jobs, SHAPES, strict=True):
        assert same(job.payload, shape), shape


async def test_every_shape_of_json_comes_back_from_a_sessions_transaction_as_it_was(door: Door) -> None:
    await door.enqueue_tx(SHAPES)
    jobs = await door.claim(100)
    assert len(jobs) == len(SHAPES)
    for job, shape in zip(jobs, SHAPES, strict=True):
        assert same(job.payload, shape), shape


@few
@given(st.lists(JSON, min_size=1, max_size=30))
async def test_any_json_comes_back_as_it_was(door: Door, payloads: list[Any]) -> None:
    await door.enqueue_many(payloads)
    jobs = await door.claim(len(payloads))
    assert all(map(same, [job.payload for job in jobs], payloads))


@few
@given(st.lists(JSON, min_size=1, max_size=10))
async def test_any_json_comes_back_from_a_sessions_transaction_as_it_was(door: Door, payloads: list[Any]) -> None:
    await door.enqueue_tx(payloads)
    jobs = await door.claim(len(payloads))
    assert all(map(same, [job.payload for job in jobs], payloads))


@few
@given(st.dictionaries(TEXT, JSON, min_size=1))
async def test_any_headers_come_back_as_they_were(door: Door, headers: dict[str, Any]) -> None:
    await door.enqueue_many([1], headers=headers)
    await door.enqueue_tx([1], headers=headers)
    jobs = await door.claim(2)
    assert [same(job.headers, headers) for job in jobs] == [True, True]


async def test_a_json_null_is_stored_as_json_null(door: Door, sql: Sql) -> None:
    await door.enqueue_many([None])
    await door.enqueue_tx([None])
    assert sql.execute("SELECT jsonb_typeof(payload) FROM alkstore.job").fetchall() == [("null",), ("null",)]


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Order:
    key: uuid.UUID
    at: datetime
    total: Decimal
    colour: Colour
    lines: list[tuple[str, int]]
    ratio: float


class Invoice(pydantic.BaseModel):
    number: int
    due: date
    total: Decimal
    note: str | None = None


ORDER = Order(
    key=uuid.UUID(int=7),
    at=datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=timezone.utc),
    total=Decimal("12345678901234567890.10"),
    colour=Colour.RED,
    lines=[("a", 1)],
    ratio=1e23,
)
TYPED: list[tuple[Any, Any]] = [
    (ORDER, Order),
    ([ORDER], list[Order]),
    (ORDER.at, datetime),
    (ORDER.key, uuid.UUID),
    (Decimal("1.10"), Decimal),
    (Colour.RED, Colour),
    (1e23, float),
    ({"a": (1, 2)}, dict[str, tuple[int, int]]),
    (Invoice(number=1, due=date(2026, 3, 1), total=Decimal("1.50")), Invoice),
]


@pytest.mark.parametrize("through", ["enqueue_many", "enqueue_tx"])
async def test_typed_payloads_come_back_as_their_type(door: Door, through: str) -> None:
    for number, (payload, payload_type) in enumerate(TYPED):
        await getattr(door, through)([payload], queue=str(number))
        (job,) = await door.claim(1, queue=str(number), payload_type=payload_type)
        assert job.payload == payload
        assert type(job.payload) is type(payload)


async def test_without_a_payload_type_they_come_back_as_plain_json(door: Door) -> None:
    await door.enqueue_many([ORDER])
    (job,) = await door.claim(1)
    assert job.payload["at"] == "2026-03-01T12:30:15.123456Z"
    assert job.payload["total"] == "12345678901234567890.10"
    assert job.decode(Order) == ORDER


async def test_a_payload_that_does_not_fit_its_type_is_dead_and_the_others_are_handed_out(door: Door, sql: Sql) -> None:
    ids = await door.enqueue_many(["1", ORDER, {"number": 1, "due": "2026-03-01", "total": "1"}, 7])
    (job,) = await door.claim(4, payload_type=Invoice)
    assert job.id == ids[2]
    for job_id in (ids[0], ids[1], ids[3]):
        dead = job_row(sql, job_id, table="dead")
        assert dead is not None
        assert (dead["reason"], "Invoice" in dead["last_error"]) == ("undecodable", True)


BAD: list[Any] = [
    *("\0", "a\0b", "\\\0", {"a": ["\0"]}, {"\0": 1}, {"a": {"\0b": 1}}),
    *("\ud800", ["a\udfff"], {"\ud800": 1}, {"a": {"\udfff": 1}}),
    *(math.nan, math.inf, -math.inf, [math.nan], {"a": [None, math.inf]}),
    *({object()}, object(), 1j, {(1, 2): 3}, 10**5000),
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
async def test_what_jsonb_cannot_hold_is_refused_and_nothing_is_stored(door: Door, sql: Sql, bad: Any) -> None:
    for through in (door.enqueue_many, door.enqueue_tx):
        with pytest.raises(PayloadError):
            await through([1, 2, bad])
        with pytest.raises(PayloadError):
            await through([1], headers={"trace": bad})
    assert stored(sql) == 0


@pytest.mark.parametrize("key", ["\0", "\ud800", "a\0", 7, None])
async def test_header_keys_are_held_to_the_same_rules(door: Door, sql: Sql, key: Any) -> None:
    for through in (door.enqueue_many, door.enqueue_tx):
        with pytest.raises(PayloadError):
            await through([1], headers={key: 1})
    assert stored(sql) == 0


@pytest.mark.parametrize("name", ["\0", "a\0b", "\ud800", ""])
async def test_names_that_cannot_be_stored_are_refused_without_a_round_trip(store: Store, name: str) -> None:
    with pytest.raises(InvalidName):
        store.queue(name)
    with pytest.raises(InvalidName):
        store.outbox(name)
    with pytest.raises(InvalidName):
        await store.queue("q").claim(name)


async def test_a_refused_payload_adds_nothing_to_the_session(store: Store, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        with pytest.raises(PayloadError):
            store.queue("q").enqueue_many_tx(session, [1, 2, "\0"])
        assert not session.new
        assert not session.in_transaction()


@pytest.mark.parametrize("letter", ["a", "ü", "\N{GRINNING FACE}"])
async def test_the_limit_counts_bytes_of_utf_8(kind: str, database: Database, sql: Sql, letter: str) -> None:
    width = len(letter.encode())
    async with opened(kind, database, max_payload_bytes=2 + 10 * width) as door:
        for through in (door.enqueue_many, door.enqueue_tx):
            await through([letter * 9 + "x" * (width - 1)])
            await through([letter * 10])
            with pytest.raises(PayloadTooLarge):
                await through([1, letter * 10 + "x"])
            with pytest.raises(PayloadTooLarge):
                await through([1], headers={"x": letter * 10})
    assert stored(sql) == 4


async def test_the_default_limit_is_16_mib(door: Door, sql: Sql) -> None:
    fitting = "x" * (16 * 1024 * 1024 - 2)
    await door.enqueue_many([fitting])
    await door.enqueue_tx([fitting])
    for through in (door.enqueue_many, door.enqueue_tx):
        with pytest.raises(PayloadTooLarge):
            await through([fitting + "x"])
    assert stored(sql) == 2
    assert [job.payload == fitting for job in await door.claim(3)] == [True, True]


async def test_50_mb_go_through_where_the_limit_is_raised(kind: str, database: Database) -> None:
    payload = {"parts": ["ü" * 5_000_000] * 5}
    async with opened(kind, database, max_payload_bytes=64_000_000) as door:
        await door.enqueue_many([payload])
        (job,) = await door.claim(1)
        assert job.payload == payload


async def test_100_000_jobs_go_in_one_call_and_their_ids_are_in_order(door: Door, sql: Sql) -> None:
    ids = await door.enqueue_many([{"n": n} for n in range(100_000)])
    assert len(set(ids)) == 100_000
    assert ids == sorted(ids)
    rows = sql.execute("SELECT (payload ->> 'n')::int FROM alkstore.job ORDER BY id").fetchall()
    assert [row[0] for row in rows] == list(range(100_000))


async def test_100_000_jobs_with_a_bad_one_are_not_stored(door: Door, sql: Sql) -> None:
    with pytest.raises(PayloadError):
        await door.enqueue_many([*range(99_999), math.nan])
    assert stored(sql) == 0


async def test_100_000_jobs_of_which_the_database_refuses_one_are_not_stored(door: Door, sql: Sql) -> None:
    sql.execute("ALTER TABLE alkstore.job ADD CONSTRAINT picky CHECK (payload <> '99999')")
    with pytest.raises(IntegrityError):
        await door.enqueue_many(list(range(100_000)))
    assert stored(sql) == 0


@pytest.mark.parametrize("rows", [1, 7, 30, 31])
async def test_portions_are_stored_in_order(door: Door, sql: Sql, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(alkstore_sa._insertion, "ROWS_PER_INSERT", rows)
    ids = await door.enqueue_many(list(range(30)))
    assert ids == sorted(ids)
    assert [job.payload for job in await door.claim(31)] == list(range(30))


async def test_several_portions_stand_or_fall_together(door: Door, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alkstore_sa._insertion, "ROWS_PER_INSERT", 10)
    sql.execute("ALTER TABLE alkstore.job ADD CONSTRAINT picky CHECK (payload <> '25')")
    with pytest.raises(IntegrityError):
        await door.enqueue_many(list(range(30)))
    assert stored(sql) == 0


async def test_portions_are_cut_by_size_too(door: Door, sql: Sql, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alkstore_sa._insertion, "BYTES_PER_INSERT", 100)
    sql.execute("ALTER TABLE alkstore.job ADD CONSTRAINT picky CHECK (payload ->> 0 <> '2')")
    with pytest.raises(IntegrityError):
        await door.enqueue_many([[n, "x" * 80] for n in range(3)])
    assert stored(sql) == 0


async def test_no_payloads_are_no_jobs(door: Door, sql: Sql) -> None:
    assert await door.enqueue_many([]) == []
    assert await door.enqueue_tx([]) == []
    assert stored(sql) == 0


async def test_an_engines_own_json_hooks_have_no_say(kind: str, database: Database) -> None:
    def refuse(_: Any) -> Any:
        raise AssertionError("the engine's JSON hook was asked")

    async with opened(kind, database, json_serializer=refuse, json_deserializer=refuse) as door:
        await door.enqueue_many([{"a": [1.5]}], headers={"h": 1})
        await door.enqueue_tx([{"a": [1.5]}], headers={"h": 1})
        assert [(job.payload, job.headers) for job in await door.claim(2)] == [({"a": [1.5]}, {"h": 1})] * 2


class Shouting(JsonCodec):
    """A codec of the caller's own."""

    def encode(self, payload: Any, /) -> str:
        return super().encode({"shouted": str(payload).upper()})

    def decode(self, document: str, into: Any, /) -> Any:
        return super().decode(document, dict[str, Any])["shouted"]


async def test_a_queues_own_codec_is_used_both_ways(store: Store, engine: AsyncEngine) -> None:
    queue = store.queue("q", codec=Shouting())
    job_id = await queue.enqueue("hello")
    async with AsyncSession(engine) as session:
        queue.enqueue_tx(session, "you")
        await session.commit()
    snapshot = await queue.get_job(job_id)
    assert snapshot is not None
    assert snapshot.payload == "HELLO"
    assert [job.payload for job in await queue.claim("w", 2)] == ["HELLO", "YOU"]


PAYLOADS = [{"k": "A-1", "n": 5, "tags": ["x", "y"]}, {"k": "A-2", "n": 6, "deep": {"k": None}}, "text", None, [1, 2]]
CONDITIONS: dict[str, tuple[Any, list[int]]] = {
    "astext": (Job.payload["k"].astext == "A-1", [0]),
    "as_integer": (Job.payload["n"].as_integer() > 5, [1]),
    "path": (Job.payload[("tags", "1")].astext == "y", [0]),
    "contains": (Job.payload.contains({"tags": ["y"]}), [0]),
    "contains null": (Job.payload.contains({"deep": {"k": None}}), [1]),
    "has_key": (Job.payload.has_key("k"), [0, 1]),
    "equal": (Job.payload == {"k": "A-1", "tags": ["x", "y"], "n": 5}, [0]),
    "equal text": (Job.payload == literal("text", Job.payload.type), [2]),
    "element": (Job.payload[1].as_integer() == 2, [4]),
    "typeof": (func.jsonb_typeof(Job.payload) == "null", [3]),
    "headers": (Job.headers["h"].astext == "%", [0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("name", CONDITIONS)
async def test_jobs_are_found_by_what_is_in_their_payload(store: Store, engine: AsyncEngine, name: str) -> None:
    ids = await store.queue("q").enqueue_many(PAYLOADS, headers={"h": "%"})
    condition, places = CONDITIONS[name]
    async with AsyncSession(engine) as session:
        found = (await session.scalars(select(Job).where(condition).order_by(Job.id))).all()
    assert [job.id for job in found] == [ids[place] for place in places]
    assert [job.payload for job in found] == [PAYLOADS[place] for place in places]


async def test_a_payload_can_be_written_into_sql_text(store: Store, engine: AsyncEngine) -> None:
    await store.queue("q").enqueue({"it's": [1, None]})
    query = select(Job.id).where(Job.payload == {"it's": [1, None]})
    text = str(query.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
    async with engine.connect() as connection:
        assert len((await connection.exec_driver_sql(text)).all()) == 1
