from __future__ import annotations

import enum
import json
import math
import uuid
from collections import namedtuple
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple

import pydantic
import pytest
from hypothesis import given, strategies as st

from alkstore_sa import JsonCodec, PayloadError, PayloadTooLarge
from alkstore_sa.codec import DEFAULT_MAX_PAYLOAD_BYTES, encode_document

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20)
# A place deep inside a payload for a value that has no business there.
PLACES: list[Any] = [
    lambda bad: bad,
    lambda bad: [1, bad],
    lambda bad: {"a": {"b": [bad]}},
    lambda bad: (bad,),
    lambda bad: Order(number=1, lines=[bad]),
]

codec = JsonCodec()


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclass
class Order:
    number: int
    lines: list[Any] = field(default_factory=list)


@dataclass
class Everything:
    at: datetime
    day: date
    clock: time
    span: timedelta
    key: uuid.UUID
    price: Decimal
    colour: Colour
    level: Level
    order: Order
    pairs: dict[str, tuple[int, str]]
    note: str | None = None


class Point(NamedTuple):
    x: int
    y: int


class Invoice(pydantic.BaseModel):
    number: int
    due: date
    total: Decimal


EVERYTHING = Everything(
    at=datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=timezone.utc),
    day=date(2026, 3, 1),
    clock=time(23, 59, 59),
    span=timedelta(days=1, microseconds=7),
    key=uuid.UUID("12345678-1234-5678-1234-567812345678"),
    price=Decimal("10.10"),
    colour=Colour.RED,
    level=Level.HIGH,
    order=Order(7, ["a", 1]),
    pairs={"k": (1, "x")},
)


def encode(payload: Any, max_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> str:
    return encode_document(codec, payload, max_bytes)


@given(JSON)
def test_every_json_value_comes_back_as_it_was(payload: Any) -> None:
    assert codec.decode(encode(payload), object) == payload


@given(JSON)
def test_the_document_is_json_for_everyone(payload: Any) -> None:
    assert json.loads(encode(payload)) == payload


def test_dataclasses_times_uuids_decimals_and_enums_come_back_as_their_type() -> None:
    assert codec.decode(encode(EVERYTHING), Everything) == EVERYTHING


def test_without_a_type_they_come_back_as_plain_json() -> None:
    assert codec.decode(encode(EVERYTHING.order), object) == {"number": 7, "lines": ["a", 1]}
    assert codec.decode(encode(EVERYTHING.at), object) == "2026-03-01T12:30:15.123456Z"
    assert codec.decode(encode(Colour.RED), object) == "red"


@pytest.mark.parametrize("digits", ["1.10", "0.1", "12345678901234567890.123456789012345678901234567890", "-1E+100"])
def test_a_decimal_keeps_its_digits(digits: str) -> None:
    assert str(codec.decode(encode(Decimal(digits)), Decimal)) == digits


def test_a_pydantic_model_comes_back_as_its_type() -> None:
    invoice = Invoice(number=1, due=date(2026, 3, 1), total=Decimal("1.50"))
    assert codec.decode(encode(invoice), Invoice) == invoice


def test_pydantic_models_inside_other_values_come_back_too() -> None:
    invoices = [Invoice(number=n, due=date(2026, 3, 1), total=Decimal("1.50")) for n in range(2)]
    assert codec.decode(encode({"all": invoices}), dict[str, list[Invoice]]) == {"all": invoices}


def test_tuples_and_sets_of_json_values_are_arrays() -> None:
    assert encode((1, "a")) == '[1,"a"]'
    assert encode(Point(1, 2)) == "[1,2]"
    assert encode({7}) == "[7]"


@pytest.mark.parametrize("value", [0, -1, 2**53 + 1, 2**63, 2**64, -(2**70), 10**1000])
def test_an_integer_of_any_size_is_exact(value: int) -> None:
    assert codec.decode(encode(value), object) == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", PLACES)
def test_nan_and_the_infinities_have_no_json_form(value: float, place: Any) -> None:
    with pytest.raises(PayloadError):
        encode(place(value))


@pytest.mark.parametrize("place", PLACES)
def test_nan_is_found_next_to_nulls_that_are_meant(place: Any) -> None:
    assert codec.decode(encode([None, "null", {"null": None}]), object) == [None, "null", {"null": None}]
    with pytest.raises(PayloadError):
        encode([None, "null", place(math.nan)])


@pytest.mark.parametrize("bad", ["\0", "a\0b", "\\\0", '"\0', "\\\\\0", "\0\\u0000", "ü\0"])
@pytest.mark.parametrize("place", [*PLACES, lambda bad: {bad: 1}, lambda bad: [{"a": {bad: None}}]])
def test_a_nul_in_a_string_or_key_is_refused(bad: str, place: Any) -> None:
    with pytest.raises(PayloadError, match="NUL"):
        encode(place(bad))


@pytest.mark.parametrize("bad", ["\ud800", "a\udfff", "\ude00\ud83d"])
@pytest.mark.parametrize("place", [*PLACES, lambda bad: {bad: 1}])
def test_a_lone_surrogate_in_a_string_or_key_is_refused(bad: str, place: Any) -> None:
    with pytest.raises(PayloadError):
        encode(place(bad))


@given(st.lists(st.sampled_from(["\\", "u", "0", '"', "n", "\\u0000", "/"])).map("".join))
def test_text_that_only_looks_like_an_escaped_nul_is_fine(text: str) -> None:
    assert codec.decode(encode({text: text}), object) == {text: text}


@given(st.text(st.sampled_from(["\\", "u", "0", "\0"])))
def test_a_nul_is_found_among_any_backslashes(text: str) -> None:
    if "\0" in text:
        with pytest.raises(PayloadError):
            encode(text)
    else:
        encode(text)


@pytest.mark.parametrize("bad", [object(), {object()}, lambda: 0, 1j, range(3), Exception("x"), type])
@pytest.mark.parametrize("place", PLACES)
def test_what_has_no_json_form_is_refused(bad: Any, place: Any) -> None:
    with pytest.raises(PayloadError, match="no JSON form"):
        encode(place(bad))


@pytest.mark.parametrize("key", [None, (1, 2), 1j, object()])
def test_a_key_without_a_text_form_is_refused(key: Any) -> None:
    with pytest.raises(PayloadError):
        encode({key: 1})


def test_a_structure_that_contains_itself_is_refused() -> None:
    payload: list[Any] = []
    payload.append(payload)
    with pytest.raises(PayloadError):
        encode(payload)


def test_a_structure_nested_too_deep_is_refused() -> None:
    payload: list[Any] = []
    for _ in range(100_000):
        payload = [payload]
    with pytest.raises(PayloadError):
        encode(payload)


@pytest.mark.parametrize("limit", [10, 1000])
@pytest.mark.parametrize("letter", ["a", "ü", "€", "\N{GRINNING FACE}"])
def test_the_size_limit_counts_bytes_of_utf_8(limit: int, letter: str) -> None:
    width = len(letter.encode())
    fitting = letter * ((limit - 2) // width)
    fitting += "x" * (limit - 2 - len(fitting.encode()))
    assert len(encode(fitting, limit).encode()) == limit
    with pytest.raises(PayloadTooLarge):
        encode(fitting + "x", limit)
    encode(fitting, limit + 1)


def test_the_message_of_a_payload_too_large_names_size_limit_and_remedy() -> None:
    with pytest.raises(PayloadTooLarge, match=r"12 bytes.*limit is 10.*max_payload_bytes"):
        encode("a" * 10, 10)


@pytest.mark.parametrize("document", ["", "{", "nope", "[1,]", '"\\ud800"', "1 2"])
def test_a_document_that_is_no_json_does_not_decode(document: str) -> None:
    with pytest.raises(PayloadError):
        codec.decode(document, object)


def test_a_document_that_does_not_fit_its_type_says_where() -> None:
    with pytest.raises(PayloadError, match=r"Order.*number"):
        codec.decode('{"number": "seven"}', Order)


def test_a_document_that_does_not_fit_a_pydantic_model_is_a_payload_error() -> None:
    with pytest.raises(PayloadError):
        codec.decode('{"number": "seven"}', Invoice)


@pytest.mark.parametrize("document", ["1e400", "[" * 100_000 + "]" * 100_000])
def test_json_that_python_cannot_hold_is_a_payload_error(document: str) -> None:
    with pytest.raises(PayloadError):
        codec.decode(document, object)


def test_a_type_that_the_codec_does_not_know_is_a_payload_error() -> None:
    with pytest.raises(PayloadError):
        codec.decode("{}", complex)


def test_a_payload_is_not_changed_by_being_encoded() -> None:
    payload = {"a": [1, {"b": (2,)}], "c": None}
    encode(payload)
    assert payload == {"a": [1, {"b": (2,)}], "c": None}


def test_an_untyped_namedtuple_is_an_array() -> None:
    pair = namedtuple("pair", "a b")  # noqa: PYI024  (the untyped one is meant)
    assert encode(pair(1, 2)) == "[1,2]"


class Markup(str):
    """Like the markup types of template engines."""

    __slots__ = ()


class Meters(float):
    """Like numpy's floats."""


def test_subclasses_of_plain_types_are_encoded_as_what_they_are() -> None:
    assert JsonCodec().encode([Markup("<b>"), Meters(1.5)]) == '["<b>",1.5]'


def test_a_lone_surrogate_that_a_codec_lets_through_is_refused() -> None:
    class Careless:
        def encode(self, payload: Any, /) -> str:
            return f'"{payload}"'

        def decode(self, document: str, into: type[Any], /) -> Any:
            return document

    with pytest.raises(PayloadError, match="surrogate"):
        encode_document(Careless(), "\ud800", 100)
