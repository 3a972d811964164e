"""Payloads to JSON text and back.

The default codec stands on msgspec: one compiled package without dependencies that encodes JSON values, dataclasses,
datetimes, UUIDs, decimals and enums, and decodes and validates into a given type. orjson decodes into no types, and
pydantic-core only through pydantic. The engine hands PostgreSQL text and casts it to `jsonb`, so an engine's own
`json_serializer` or `json_deserializer` is never asked.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from alkstore_sa.errors import PayloadError, PayloadTooLarge

__all__ = ["DEFAULT_MAX_PAYLOAD_BYTES", "Codec", "JsonCodec", "encode_document"]

T = TypeVar("T")

DEFAULT_MAX_PAYLOAD_BYTES: Final = 16 * 1024 * 1024

# An escaped NUL, but not the six characters "\u0000" behind an escaped backslash.
ESCAPED_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Codec(Protocol):
    """What a store or queue needs to turn payloads into JSON text and back.

    Both methods raise `PayloadError` for what they cannot do. A job whose payload does not decode at its claim is
    moved to dead; the others of that claim go on.
    """

    def encode(self, payload: Any, /) -> str:
        """Return the JSON text of `payload`."""
        ...

    def decode(self, document: str, into: type[T], /) -> T:
        """Return the value of the JSON text `document` as an `into`; `object` means plain JSON values."""
        ...


class JsonCodec:
    """The default codec: JSON values, dataclasses, `datetime`, `UUID`, `Decimal`, enums, msgspec and pydantic models.

    A decimal is written as a string, so that it keeps its digits, and comes back as one unless a type asks for more.
    """

    def encode(self, payload: Any, /) -> str:
        """Return the JSON text of `payload`.

        Raises:
            PayloadError: some part of it has no JSON form, is NaN or infinite, or is no valid text.
        """
        try:
            document = msgspec.json.encode(payload, enc_hook=_encode_foreign).decode()
            if "null" in document:  # msgspec writes NaN and the infinities as null, and so would lose them
                json.dumps(msgspec.to_builtins(payload, enc_hook=_encode_foreign, str_keys=True), allow_nan=False)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PayloadError(f"payload {_excerpt(payload)} has no JSON form: {error}") from error
        return document

    def decode(self, document: str, into: type[T], /) -> T:
        """Return the value of `document`, checked against `into`.

        Raises:
            PayloadError: the document is not valid JSON, or does not fit `into`; the message says what was expected.
        """
        target = cast("type[T]", Any if into is object else into)
        try:
            return msgspec.json.decode(document, type=target, dec_hook=_decode_foreign)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            name = "JSON" if into is object else getattr(into, "__qualname__", str(into))
            raise PayloadError(f"payload does not decode into {name}: {error}") from error


def encode_document(codec: Codec, payload: Any, max_bytes: int, what: str = "payload") -> str:
    """Return the JSON text of `payload` by `codec`, held to what `jsonb` and the size limit take.

    Raises:
        PayloadError: the codec cannot encode it, or a string in it holds a NUL or a lone surrogate.
        PayloadTooLarge: its UTF-8 text has more than `max_bytes` bytes.
    """
    document = codec.encode(payload)
    if "\\u0000" in document and ESCAPED_NUL.search(document):
        raise PayloadError(
            f"{what} {_excerpt(payload)} holds a NUL character, which PostgreSQL's jsonb cannot store; remove it"
        )
    try:
        size = len(document) if document.isascii() else len(document.encode())
    except UnicodeEncodeError as error:
        raise PayloadError(
            f"{what} {_excerpt(payload)} holds a lone surrogate, which is no valid text: {error}"
        ) from error
    if size > max_bytes:
        raise PayloadTooLarge(
            f"{what} has {size} bytes of JSON, the limit is {max_bytes}: store the data in a table of your own and"
            " enqueue its key, or raise max_payload_bytes of the store"
        )
    return document


def _excerpt(payload: Any) -> str:
    """Return enough of `payload` to recognise it in an error message."""
    return f"of type {type(payload).__name__}"


def _encode_foreign(value: Any) -> Any:
    """Encode what msgspec does not know: subclasses of plain types, and pydantic models, told by their method."""
    for plain in (str, int, float):
        if isinstance(value, plain):  # a subclass, such as markup or a numpy float
            return plain(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"an object of type {type(value).__name__} is not supported")


def _decode_foreign(into: type[Any], value: Any) -> Any:
    """Decode into what msgspec does not know by itself: pydantic models."""
    if hasattr(into, "model_validate"):
        return into.model_validate(value)
    raise TypeError(f"type {into.__name__} is not supported")
