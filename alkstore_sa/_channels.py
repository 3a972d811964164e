"""The names of LISTEN/NOTIFY channels, and what a notification may carry. Functions without I/O.

PostgreSQL cuts a channel's name at 63 bytes. So a user's channel of up to 63 bytes is the channel itself, and any other
client may use it; a longer one is hashed under the engine's prefix, like the channels of the engine's own wakes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, Literal

from alkstore_sa._rules import ENGINE_PREFIX, check_name, is_encodable
from alkstore_sa.errors import PayloadError, PayloadTooLarge

__all__ = ["RECONNECTED", "check_notification", "quote_channel", "user_channel", "wake_channel"]

RECONNECTED: Final = f"{ENGINE_PREFIX}listener_reconnected__"
"""The channel of the notification that every subscriber gets after the listening connection was lost and replaced:
what was notified in between is lost, so read again whatever the notifications were about."""

MAX_CHANNEL_BYTES: Final = 63
MAX_PAYLOAD_BYTES: Final = 7999
DIGEST_BYTES: Final = 20


def wake_channel(schema: str, kind: Literal["queue", "stream"], name: str) -> str:
    """Return the channel that wakes the consumers of a queue or stream in one schema."""
    return f"{ENGINE_PREFIX}{kind}_{_digest(schema, name)}"


def user_channel(name: str) -> str:
    """Return the channel that PostgreSQL knows for a caller's `name`, or raise `InvalidName` or `ReservedName`."""
    check_name(name, "channel")
    return name if len(name.encode()) <= MAX_CHANNEL_BYTES else f"{ENGINE_PREFIX}channel_{_digest(name)}"


def check_notification(payload: object) -> str:
    """Return a notification's payload, or raise for what PostgreSQL would not deliver.

    Raises:
        PayloadError: it is no `str`, or holds a NUL or a lone surrogate.
        PayloadTooLarge: it has 8000 bytes or more.
    """
    if not isinstance(payload, str):
        raise PayloadError(f"a notification's payload is a str, not {type(payload).__name__}: encode it, say as JSON")
    if "\0" in payload or not is_encodable(payload):
        raise PayloadError("a notification's payload holds no NUL and no lone surrogate, PostgreSQL cannot send them")
    size = len(payload.encode())
    if size > MAX_PAYLOAD_BYTES:
        raise PayloadTooLarge(
            f"a notification carries less than 8000 bytes, this payload has {size}: put the data into a stream or a job"
            " and notify its id"
        )
    return payload


def quote_channel(channel: str) -> str:
    """Return `channel` as an SQL identifier, for LISTEN and UNLISTEN, which take no parameters."""
    return '"' + channel.replace('"', '""') + '"'


def _digest(*parts: str) -> str:
    # A length before each part: ("a", "bc") is not ("ab", "c").
    return blake2b("".join(f"{len(part)}:{part}" for part in parts).encode(), digest_size=DIGEST_BYTES).hexdigest()
