from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from alkstore_sa import StopToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE = 10.0


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Have SIGUSR1 call a function, and put the old handler back afterwards."""
    before = signal.getsignal(signal.SIGUSR1)

    def install(function: Callable[[], None]) -> None:
        signal.signal(signal.SIGUSR1, lambda _number, _frame: function())

    yield install
    signal.signal(signal.SIGUSR1, before)


def test_a_new_token_is_not_cancelled() -> None:
    assert not StopToken().cancelled


def test_a_cancelled_token_stays_cancelled() -> None:
    stop = StopToken()
    stop.cancel()
    stop.cancel()
    assert stop.cancelled


async def test_a_wait_ends_when_the_loop_cancels() -> None:
    stop = StopToken()
    waiting = asyncio.create_task(stop.wait(DEADLINE))
    await asyncio.sleep(0)
    stop.cancel()
    assert await waiting is True


async def test_a_wait_on_a_cancelled_token_returns_at_once() -> None:
    stop = StopToken()
    stop.cancel()
    assert await asyncio.wait_for(stop.wait(), DEADLINE) is True


async def test_a_wait_that_times_out_tells_that_nobody_cancelled() -> None:
    assert await StopToken().wait(0.001) is False


async def test_a_wait_ends_when_another_thread_cancels() -> None:
    stop = StopToken()
    waiting = asyncio.create_task(stop.wait())
    await asyncio.sleep(0)
    thread = threading.Thread(target=stop.cancel)
    thread.start()
    assert await asyncio.wait_for(waiting, DEADLINE) is True
    thread.join()


async def test_a_wait_ends_when_a_signal_handler_cancels(on_signal: Callable[[Callable[[], None]], None]) -> None:
    stop = StopToken()
    on_signal(stop.cancel)
    waiting = asyncio.create_task(stop.wait())
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert await asyncio.wait_for(waiting, DEADLINE) is True


def test_a_signal_handler_may_interrupt_the_thread_that_is_cancelling(
    on_signal: Callable[[Callable[[], None]], None],
) -> None:
    stop = StopToken()
    on_signal(stop.cancel)
    calls: list[bool] = []
    with stop._lock:  # where a handler would find the interrupted thread
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + DEADLINE
        while not stop.cancelled and time.monotonic() < deadline:
            pass
    with stop.notifying(lambda: calls.append(stop.cancelled)):
        assert calls == [True]


async def test_one_token_stops_any_number_of_waits() -> None:
    stop = StopToken()
    waits = [asyncio.create_task(stop.wait()) for _ in range(20)]
    await asyncio.sleep(0)
    stop.cancel()
    assert await asyncio.wait_for(asyncio.gather(*waits), DEADLINE) == [True] * 20


def test_one_token_stops_waits_on_several_event_loops() -> None:
    stop = StopToken()
    started = threading.Barrier(4)
    outcomes: list[bool] = []

    async def wait() -> None:
        started.wait(DEADLINE)
        outcomes.append(await asyncio.wait_for(stop.wait(), DEADLINE))

    threads = [threading.Thread(target=asyncio.run, args=(wait(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    started.wait(DEADLINE)
    stop.cancel()
    for thread in threads:
        thread.join(DEADLINE)
    assert outcomes == [True] * 3


def test_cancelling_after_the_waiting_loop_was_closed_does_no_harm() -> None:
    stop = StopToken()
    loop = asyncio.new_event_loop()
    task = loop.create_task(stop.wait())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    stop.cancel()
    assert stop.cancelled


def test_cancelling_after_a_loop_was_closed_around_its_wait_does_no_harm() -> None:
    stop = StopToken()
    loop = asyncio.new_event_loop()
    wait = stop.wait()
    task = loop.create_task(wait)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    stop.cancel()
    assert stop.cancelled
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # the abandoned task is this test's own doing
    wait.close()


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    stop = StopToken()
    waiting = asyncio.create_task(stop.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert not stop._callbacks


def test_a_callback_is_called_once_however_often_the_token_is_cancelled() -> None:
    stop = StopToken()
    calls: list[int] = []
    with stop.notifying(lambda: calls.append(1)):
        stop.cancel()
        stop.cancel()
    assert calls == [1]


def test_a_callback_is_called_at_once_where_the_token_is_cancelled_already() -> None:
    stop = StopToken()
    stop.cancel()
    calls: list[int] = []
    with stop.notifying(lambda: calls.append(1)):
        assert calls == [1]


def test_a_callback_is_not_called_after_its_block() -> None:
    stop = StopToken()
    calls: list[int] = []
    with stop.notifying(lambda: calls.append(1)):
        pass
    stop.cancel()
    assert calls == []


def test_threads_that_cancel_at_once_call_each_callback_once() -> None:
    stop = StopToken()
    calls: list[int] = []
    together = threading.Barrier(8)

    def cancel() -> None:
        together.wait(DEADLINE)
        stop.cancel()

    with stop.notifying(lambda: calls.append(1)):
        threads = [threading.Thread(target=cancel) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    assert calls == [1]


def test_a_thread_without_a_loop_waits_until_another_cancels() -> None:
    token = StopToken()
    threading.Timer(0.01, token.cancel).start()
    assert token.wait_sync(20) is True
    assert token.wait_sync(20) is True


def test_a_thread_without_a_loop_waits_no_longer_than_it_says() -> None:
    assert StopToken().wait_sync(0.001) is False
