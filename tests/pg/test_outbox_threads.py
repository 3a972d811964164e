"""Handles of plain deliveries whose event loop ends before they do."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from support.databases import Database

PROGRAM: Final = """
import asyncio, contextlib, sys, threading
from sqlalchemy.ext.asyncio import create_async_engine
from alkstore_sa import StopToken, Store

gate = threading.Event()
outcome = []

async def main():
    engine = create_async_engine(sys.argv[1])
    outbox = Store(engine).outbox("mail")
    await outbox.enqueue("x")
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def deliver(job):
        loop.call_soon_threadsafe(begun.set)
        gate.wait()
        try:
            job.heartbeat()
        except Exception as error:
            print(type(error).__name__, flush=True)

    running = asyncio.create_task(outbox.run("w", deliver, StopToken()))
    await begun.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await engine.dispose()

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
if sys.argv[2] == "closed":
    loop.close()
gate.set()
"""


@pytest.mark.parametrize("state", ["stopped", "closed"])
def test_a_thread_that_outlives_its_event_loop_gets_an_error_and_the_program_ends(
    database: Database, driver: str, state: str
) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, database.url(driver), state]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
    assert ended.returncode == 0
    assert ended.stdout
    assert "never awaited" not in ended.stderr
