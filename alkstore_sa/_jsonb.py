"""The column type of payloads and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Text, cast, type_coerce
from sqlalchemy.dialects.postgresql import JSONB

from alkstore_sa.codec import JsonCodec

if TYPE_CHECKING:
    from sqlalchemy.sql import ColumnElement
    from sqlalchemy.sql.elements import BindParameter

__all__ = ["JsonDocument"]

CODEC = JsonCodec()


class JsonDocument(JSONB):
    """A `jsonb` column that goes over the wire as text.

    The driver's and the engine's own JSON hooks (`json_serializer`, `json_deserializer`) so have no say in it. In
    queries it is SQLAlchemy's `JSONB`: `Job.payload["order"].astext == "A-1"`.
    """

    cache_ok = True
    render_bind_cast = False

    def adapt(self, *_: Any, **__: Any) -> Any:
        """Stay what it is: the drivers' own versions of `JSONB` would bring the engine's JSON hooks back."""
        return JsonDocument()

    def bind_expression(self, bindvalue: BindParameter[Any]) -> ColumnElement[Any]:
        """Send text and have the server cast it."""
        return cast(cast(bindvalue, Text()), JSONB())

    def column_expression(self, colexpr: ColumnElement[Any]) -> ColumnElement[Any]:
        """Have the server send text."""
        return type_coerce(cast(colexpr, Text()), self)

    def bind_processor(self, dialect: Any) -> Any:  # noqa: ARG002
        """Encode a value."""
        return CODEC.encode

    def literal_processor(self, dialect: Any) -> Any:  # noqa: ARG002
        """Write a value into SQL text."""
        return _literal

    def result_processor(self, dialect: Any, coltype: object) -> Any:  # noqa: ARG002
        """Decode a value; SQL's NULL, from an outer join or a missing key, is None."""
        return _decode


def _literal(value: Any) -> str:
    return "'" + CODEC.encode(value).replace("'", "''") + "'"


def _decode(document: Any) -> Any:
    # Anything but text has come past `column_expression`, as in textual SQL, and was decoded by the driver.
    return CODEC.decode(document, object) if isinstance(document, str) else document
