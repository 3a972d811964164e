"""The other system: an HTTP server that takes orders, and has the troubles that other systems have.

Which trouble an order meets depends on its number alone, so each run goes the same way.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def never_accepted(order: str) -> bool:
    """Tell whether the receiver answers 503 to this order for ever, so that its message ends as dead."""
    return order.endswith("50")


def refused_at_first(order: str) -> bool:
    """Tell whether the receiver answers 503 to the first delivery of this order."""
    return order.endswith("7")


def answer_gets_lost(order: str) -> bool:
    """Tell whether the receiver takes this order at its first delivery, but its answer never arrives."""
    return order.endswith(("05", "45"))


class Receiver:
    """Takes messages and counts them. Threads may use it at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliveries: Counter[str] = Counter()
        self._accepted: set[str] = set()
        self.received: Counter[str] = Counter()
        """How often each order was taken in: once, unless a repeated delivery was not recognised as one."""
        self.repeats = 0
        """How many deliveries were recognised as repeated ones, by their key."""

    @property
    def retried(self) -> int:
        """How many messages came more than once, whatever was answered."""
        with self._lock:
            return sum(1 for count in self._deliveries.values() if count > 1)

    def receive(self, key: str, order: str) -> HTTPStatus | None:
        """Take a delivery in and return the answer; None when it gets lost."""
        with self._lock:
            self._deliveries[key] += 1
            first = self._deliveries[key] == 1
            if never_accepted(order) or (first and refused_at_first(order)):
                return HTTPStatus.SERVICE_UNAVAILABLE
            if key in self._accepted:
                self.repeats += 1
            else:
                self._accepted.add(key)
                self.received[order] += 1
            return None if first and answer_gets_lost(order) else HTTPStatus.OK

    @contextmanager
    def listening(self) -> Iterator[int]:
        """Serve HTTP on a free port of 127.0.0.1 in the background, and yield the port."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = receiver.receive(self.headers["Idempotency-Key"], body["order"])
                if answer is not None:
                    self.send_response(answer)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print no line for each request."""

        with _Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="receiver")
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()


class _Server(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 128
