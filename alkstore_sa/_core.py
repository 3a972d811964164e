"""What both stores share: the models and statements, the codec, the marks, the wakes, the check of the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeVar

from alkstore_sa._channels import wake_channel
from alkstore_sa._hub import Hub
from alkstore_sa._marks import Marks
from alkstore_sa._rules import check_count
from alkstore_sa._waker import Announcement, Waker
from alkstore_sa.codec import JsonCodec
from alkstore_sa.errors import BindError, ReservedName, SchemaMismatch, SchemaMissing
from alkstore_sa.models import SCHEMA_VERSION, models_for
from alkstore_sa.statements import statements_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection

    from alkstore_sa.codec import Codec
    from alkstore_sa.models import Models
    from alkstore_sa.statements import Statements

__all__ = ["StoreCore"]

T = TypeVar("T")

OLDEST_USABLE: Final = max(SCHEMA_VERSION - 1, 1)
"""This package works on the schema of the version before too, so that code can be deployed before the migration."""

MAX_MARKS: Final = 10_000


class StoreCore:
    """The part of a store that needs no door."""

    def __init__(self, schema: str, codec: Codec | None, max_payload_bytes: int) -> None:
        self.schema: str = schema
        self.models: Models = models_for(schema)
        self.statements: Statements = statements_for(schema)
        self.codec: Codec = codec or JsonCodec()
        self.header_codec: Codec = JsonCodec()
        self.max_payload_bytes: int = check_count(max_payload_bytes, "max_payload_bytes")
        self.hub: Hub = Hub()
        self.waker: Waker = Waker(self.hub.wake)
        self._checked: bool = False
        self._marks: dict[str, Marks] = {}

    def marks(self, queue: str) -> Marks:
        """Return where this process's claims of `queue` have got to."""
        marks = self._marks.get(queue)
        if marks is None:
            if len(self._marks) >= MAX_MARKS:  # they are hints: forgetting them costs a claim from the head each
                self._marks = {}
            marks = self._marks[queue] = Marks()
        return marks

    def announcement(self, kind: Literal["queue", "stream"], name: str) -> Announcement:
        """Return what wakes the consumers of a queue or stream."""
        return Announcement(self.waker, wake_channel(self.schema, kind, name))

    def checked(self, operation: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Return `operation`, preceded by the check of the schema as long as none has passed."""
        if self._checked:
            return operation

        def with_check(connection: Connection) -> T:
            self.check(connection)
            self._checked = True
            return operation(connection)

        return with_check

    def check(self, connection: Connection) -> None:
        """Raise if the database does not hold the engine's tables in a version that this package works on.

        Raises:
            SchemaMissing: there are none.
            SchemaMismatch: they are older or newer.
            ReservedName: the schema is also where the role's own tables go by default.
            BindError: the driver cannot read times in the server's DateStyle.
        """
        found = connection.execute(self.statements.find_version_table, {"table": self.statements.version_table}).one()
        if not found.present:
            raise SchemaMissing(
                f"schema {self.schema!r} of this database has no tables of the engine: run the migration that calls"
                f" op.alkstore_upgrade(to={SCHEMA_VERSION}, from_=0, schema={self.schema!r}), by `alembic upgrade head`"
            )
        if connection.dialect.driver == "psycopg" and not found.date_style.startswith("ISO"):
            raise BindError(
                f"this connection's DateStyle is {found.date_style!r}, and psycopg reads times in ISO alone: set it for"
                ' the role or the engine, as in connect_args={"options": "-c datestyle=ISO"}'
            )
        if found.default_schema == self.schema:
            raise ReservedName(
                f"schema {self.schema!r} is where this role's own tables go by default: give the engine another schema,"
                " or set the role's search_path"
            )
        version: int = connection.scalars(self.statements.version).one()
        if version < OLDEST_USABLE:
            raise SchemaMismatch(
                f"the engine's tables in schema {self.schema!r} have version {version}, this package needs at least"
                f" {OLDEST_USABLE}: run a migration that calls"
                f" op.alkstore_upgrade(to={SCHEMA_VERSION}, from_={version}, schema={self.schema!r})"
            )
        if version > SCHEMA_VERSION:
            raise SchemaMismatch(
                f"the engine's tables in schema {self.schema!r} have version {version}, this package knows versions up"
                f" to {SCHEMA_VERSION}: upgrade alkstore_sa, or downgrade the tables with the newer package"
            )
