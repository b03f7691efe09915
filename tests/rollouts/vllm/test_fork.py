"""A process that is forked begins with free locks, and makes engines of its own."""

import asyncio
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from engine_inputs import generate_one, image, request
from fake_server import FakeVLLM

from renderers import MediaSource
from renderers.media.store import MediaStore
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import EngineError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def fork(in_child: Callable[[], Any]) -> int:
    """Fork, and run `in_child` in the child, which ends with status 0 if it returned within 20 s; the child's id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads, which is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        asyncio._set_running_loop(None)
        try:
            in_child()
        except BaseException:  # noqa: BLE001 whatever fails, the child must not run on as a second pytest
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


async def test_a_child_of_a_process_that_uses_an_engine_makes_one_of_its_own(
    engine: VLLMEngine, server: FakeVLLM
) -> None:
    assert len((await generate_one(engine, request(image()))).token_ids) > 0
    (sent,) = server.generations

    async def check() -> None:
        with pytest.raises(EngineError, match="make an engine for each event loop, thread and process"):
            await generate_one(engine, request(image()))
        async with VLLMEngine(server.base_url) as own:
            assert len((await generate_one(own, request(image()))).token_ids) > 0

    child = fork(lambda: asyncio.run(check()))
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert status == 0
    assert len((await generate_one(engine, request(image()))).token_ids) > 0
    assert server.generations[-1].connection == sent.connection  # the child has left it alone


def test_a_lock_that_a_thread_held_is_free_in_the_child() -> None:
    store = MediaStore()
    held, release = Future[None](), threading.Event()

    def hold_lock() -> None:
        with store._lock:
            held.set_result(None)
            release.wait()

    thread = threading.Thread(target=hold_lock)
    thread.start()
    held.result()
    _, status = os.waitpid(fork(lambda: store.add_source(MediaSource.of(b"bytes"))), 0)
    release.set()
    thread.join()
    assert status == 0
