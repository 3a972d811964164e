from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from alkstore_sa import InvalidName, PayloadError, PayloadTooLarge, ReservedName
from alkstore_sa._channels import RECONNECTED, check_notification, quote_channel, user_channel, wake_channel
from alkstore_sa._rules import ENGINE_PREFIX

STORABLE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
NAMES = st.text(STORABLE, min_size=1, max_size=200).filter(lambda name: not name.startswith(ENGINE_PREFIX))
LONG_NAMES = st.text(STORABLE, min_size=64, max_size=200).filter(lambda name: not name.startswith(ENGINE_PREFIX))
SMILE = "\N{GRINNING FACE}"  # four bytes

# -- channels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "a" * 63, "é" * 31 + "a", "名" * 21, SMILE * 15 + "abc", 'a"b', "a'b", "100%"])
def test_a_name_of_up_to_63_bytes_is_the_channel_itself(name: str) -> None:
    assert user_channel(name) == name


@pytest.mark.parametrize("name", ["a" * 64, "a" * 200, "é" * 32, "名" * 21 + "a", SMILE * 16, SMILE * 200])
def test_a_longer_name_is_hashed_under_the_engines_prefix(name: str) -> None:
    assert user_channel(name).startswith(ENGINE_PREFIX)


@given(NAMES)
@example("a" * 64)
@example(SMILE * 200)
def test_no_channel_is_longer_than_postgresql_keeps(name: str) -> None:
    assert len(user_channel(name).encode()) <= 63


@given(NAMES, st.text(STORABLE, min_size=1, max_size=63))
@example("a" * 200, "b" * 63)
def test_a_wakes_channel_is_no_longer_either_whatever_the_names(name: str, schema: str) -> None:
    assert len(wake_channel(schema, "queue", name).encode()) <= 63
    assert len(wake_channel(schema, "stream", name).encode()) <= 63


@given(NAMES, NAMES)
@example("a" * 63, "a" * 64)
@example("a" * 199 + "b", "a" * 199 + "c")
@example("é" * 100 + "a", "é" * 100 + "b")
def test_two_names_never_share_a_channel(one: str, other: str) -> None:
    assert (user_channel(one) == user_channel(other)) == (one == other)


@given(LONG_NAMES, st.integers(0, 199), STORABLE)
def test_a_long_name_that_differs_in_one_character_has_another_channel(name: str, place: int, other: str) -> None:
    place %= len(name)
    changed = name[:place] + other + name[place + 1 :]
    if changed != name:
        assert user_channel(changed) != user_channel(name)


@given(LONG_NAMES)
def test_what_a_long_name_is_hashed_to_is_no_name_that_a_caller_could_use(name: str) -> None:
    with pytest.raises(ReservedName):
        user_channel(user_channel(name))


@given(NAMES, NAMES)
@example("a" * 64, "a" * 64)
def test_no_users_channel_is_one_of_the_engines_own(users: str, engines: str) -> None:
    own = {wake_channel("alkstore", "queue", engines), wake_channel("alkstore", "stream", engines), RECONNECTED}
    assert user_channel(users) not in own


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
@example(("a", "bc"), ("ab", "c"))
@example(("1:a", "b"), ("1", ":ab"))
def test_two_queues_never_share_a_wake(one: tuple[str, str], other: tuple[str, str]) -> None:
    channels = [wake_channel(schema, "queue", name) for schema, name in (one, other)]
    assert (channels[0] == channels[1]) == (one == other)


def test_a_queue_and_a_stream_of_one_name_have_different_wakes() -> None:
    assert wake_channel("alkstore", "queue", "a") != wake_channel("alkstore", "stream", "a")


def test_a_wakes_channel_tells_nothing_of_the_name() -> None:
    assert "emails" not in wake_channel("alkstore", "queue", "emails")


def test_channels_are_the_same_in_every_process_and_release() -> None:
    # Processes of two releases wake each other during a deployment, so these are part of the interface.
    assert user_channel("a" * 64) == "__alkstore_channel_8ed63849f4ad2ab81d30f0c9dc59bbac278c2964"
    assert wake_channel("alkstore", "queue", "emails") == "__alkstore_queue_d24646c2363f223f1d889f793a21e30414a9a052"


@pytest.mark.parametrize("name", ["", "a" * 201, "a\0b", "\ud800", 7, None, b"a"])
def test_a_channels_name_follows_the_rules_of_names(name: Any) -> None:
    with pytest.raises(InvalidName, match=r"^channel name"):
        user_channel(name)


@pytest.mark.parametrize("name", [ENGINE_PREFIX, RECONNECTED, ENGINE_PREFIX + "a" * 60])
def test_the_engines_channels_are_reserved(name: str) -> None:
    with pytest.raises(ReservedName, match=r"^channel name"):
        user_channel(name)


@given(st.text(STORABLE, min_size=1, max_size=63))
@example('a"b')
@example('"')
@example('";DROP TABLE x;--')
def test_a_quoted_channel_is_one_identifier(channel: str) -> None:
    quoted = quote_channel(channel)
    assert quoted[0] == quoted[-1] == '"'
    assert '"' not in quoted[1:-1].replace('""', "")
    assert quoted[1:-1].replace('""', '"') == channel


# -- payloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["", "a", "a" * 7999, "é" * 3999 + "a", SMILE * 1999 + "abc", "'\"%\\\n"])
def test_a_text_of_less_than_8000_bytes_is_a_payload(payload: str) -> None:
    assert check_notification(payload) == payload


@pytest.mark.parametrize("payload", ["a" * 8000, "é" * 4000, SMILE * 2000, "a" * 100_000])
def test_a_text_of_8000_bytes_is_too_large(payload: str) -> None:
    with pytest.raises(PayloadTooLarge):
        check_notification(payload)


def test_the_message_says_the_rule_the_size_and_the_remedy() -> None:
    with pytest.raises(PayloadTooLarge, match=r"less than 8000 bytes.* 8002: .*stream or a job.*notify its id"):
        check_notification("é" * 4001)


@pytest.mark.parametrize("payload", ["\0", "a\0b", "a\0"])
def test_a_payload_holds_no_nul(payload: str) -> None:
    with pytest.raises(PayloadError, match="NUL"):
        check_notification(payload)


def test_a_payload_holds_no_lone_surrogate() -> None:
    with pytest.raises(PayloadError, match="surrogate"):
        check_notification("\ud800")


@pytest.mark.parametrize("payload", [None, 7, b"bytes", {"id": 7}, ["a"], True])
def test_a_payload_that_is_no_text_is_refused_with_the_remedy(payload: object) -> None:
    with pytest.raises(PayloadError, match=f"not {type(payload).__name__}: encode it, say as JSON"):
        check_notification(payload)
