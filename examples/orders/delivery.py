"""Delivering a message: an HTTP request to the other system, sent after the order was committed."""

from __future__ import annotations

import json
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alkstore_sa import ClaimedJob


class NotAccepted(Exception):
    """The other system did not take the message."""


class HttpDelivery:
    """Sends messages to the receiver: what the outbox calls, with a job it has claimed."""

    def __init__(self, port: int) -> None:
        self._port = port

    def __call__(self, job: ClaimedJob[Any]) -> None:
        """Send one message; `Outbox.run` calls a plain function like this one in a thread.

        Returning means delivered. Raising anything means not delivered: the outbox tries again later, and after the
        last attempt it keeps the message as dead, with this error.
        """
        # The job's id is the same at every attempt, so the receiver can tell a repeated delivery from a new message.
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(job.id)}
        with closing(HTTPConnection("127.0.0.1", self._port, timeout=10)) as connection:
            connection.request("POST", "/orders", json.dumps(job.payload), headers)
            response = connection.getresponse()
            if response.status != HTTPStatus.OK:
                raise NotAccepted(f"the receiver answered {response.status} {response.reason}")
