"""Inserting a row for each of many payloads, in one round trip where they fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy import Connection, TextClause

__all__ = ["Insertion"]

# One statement carries at most this much; more goes in several of one transaction.
ROWS_PER_INSERT: Final = 100_000
BYTES_PER_INSERT: Final = 128 * 1024 * 1024


@dataclass(frozen=True)
class Insertion:
    """The operation that inserts rows; it needs a transaction around it where one statement cannot carry them all."""

    statement: TextClause
    parameters: dict[str, Any]
    portions: tuple[list[str], ...]

    @property
    def atomic(self) -> bool:
        """Tell whether there is more than one statement."""
        return len(self.portions) > 1

    @classmethod
    def of(cls, statement: TextClause, parameters: dict[str, Any], documents: Iterable[str]) -> Insertion:
        """Return the operation that inserts a row for each document."""
        return cls(statement, parameters, tuple(_portions(documents)))

    def __call__(self, connection: Connection) -> list[int]:
        """Insert the rows and return their ids."""
        return [
            row_id
            for documents in self.portions
            for row_id in connection.scalars(self.statement, self.parameters | {"payloads": documents})
        ]


def _portions(documents: Iterable[str]) -> Iterator[list[str]]:
    """Cut documents into the portions that one statement each carries."""
    portion: list[str] = []
    size = 0
    for document in documents:
        if portion and (len(portion) == ROWS_PER_INSERT or size + len(document) > BYTES_PER_INSERT):
            yield portion
            portion, size = [], 0
        portion.append(document)
        size += len(document)
    if portion:
        yield portion
