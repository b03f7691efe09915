"""A process that is forked while requests run begins with free locks and without their pending work."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest
from engine_inputs import generate_one, image, request
from fake_responses import hold
from fake_server import GENERATE, FakeVLLM
from rendering_server import RenderingServer, text, user

from renderers import MediaSource
from renderers.media.store import MediaStore
from renderers.process.caches import ByteLRU
from renderers.process.fork_reset import ProcessLock
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.connection import SingleFlight
from rollouts.engines.vllm.server_media_cache import ServerMediaCache
from rollouts.engines.vllm.server_renderer import BlockingServerRenderer, ServerRenderer

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


async def succeeds_in_child(check: Callable[[], Coroutine[Any, Any, None]]) -> bool:
    child = fork(lambda: asyncio.run(check()))
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    return status == 0


async def test_an_item_that_the_parent_is_sending_is_sent_by_the_child_too() -> None:
    cache = ServerMediaCache()
    in_parent = await cache.reserve({"a": 10})

    async def check() -> None:
        reservation = await cache.reserve({"a": 10})
        assert reservation.included == {"a"}
        cache.commit(reservation)
        assert "a" in cache

    assert await succeeds_in_child(check)
    assert "a" not in cache
    cache.commit(in_parent)


async def test_an_item_that_the_server_holds_is_not_sent_again_by_the_child() -> None:
    cache = ServerMediaCache()
    cache.commit(await cache.reserve({"a": 10}))

    async def check() -> None:
        assert (await cache.reserve({"a": 10})).omitted == {"a"}

    assert await succeeds_in_child(check)


async def test_a_call_that_runs_in_the_parent_is_made_again_in_the_child() -> None:
    calls: SingleFlight[int] = SingleFlight()
    end = asyncio.Event()

    async def make() -> int:
        await end.wait()
        return os.getpid()

    in_parent = asyncio.ensure_future(calls.run("key", make))
    await asyncio.sleep(0)

    async def check() -> None:
        async def make_in_child() -> int:
            return os.getpid()

        assert await calls.run("key", make_in_child) == os.getpid()

    assert await succeeds_in_child(check)
    end.set()
    assert await in_parent == os.getpid()


async def test_a_child_generates_while_the_same_request_runs_in_the_parent(
    engine: VLLMEngine, server: FakeVLLM
) -> None:
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] = [hold(release, arrived)]
    same = request(image(), request_id="same")
    in_parent = asyncio.ensure_future(generate_one(engine, same))
    await arrived.wait()

    async def check() -> None:
        assert len((await generate_one(engine, same)).token_ids) > 0
        await engine.close()

    assert await succeeds_in_child(check)
    release.set()
    assert len((await in_parent).token_ids) > 0


@pytest.mark.parametrize(
    ("target", "use"),
    [
        (ByteLRU(100), lambda target: target.put("a", 1, 10)),
        (MediaStore(), lambda target: target.add_source(MediaSource.of(b"bytes"))),
        (ServerMediaCache(), lambda target: target.clear()),
    ],
    ids=["ByteLRU", "MediaStore", "ServerMediaCache"],
)
def test_a_lock_that_a_thread_held_is_free_in_the_child(target: Any, use: Callable[[Any], Any]) -> None:
    held, release = Future[None](), threading.Event()

    def hold_lock() -> None:
        with target._lock:
            held.set_result(None)
            release.wait()

    thread = threading.Thread(target=hold_lock)
    thread.start()
    held.result()
    _, status = os.waitpid(fork(lambda: use(target)), 0)
    release.set()
    thread.join()
    assert status == 0


def test_a_lock_that_the_forking_thread_holds_is_free_in_the_child() -> None:
    lock = ProcessLock()

    def end_the_block() -> None:
        with lock:
            pass
        lock.__exit__()  # of the block in which the process was forked

    with lock:
        child = fork(end_the_block)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_within_a_change_leaves_a_cache_that_counts_right() -> None:
    cache: ByteLRU[str, int] = ByteLRU(100)
    cache.put("a", 1, 40)
    cache._nbytes = 1000  # as if a thread of the parent were between two statements of `put`

    def check() -> None:
        assert cache.nbytes == 40
        assert cache.put("b", 2, 60) == []
        assert cache.put("c", 3, 10) == [("a", 1)]

    assert os.waitpid(fork(check), 0)[1] == 0


def test_the_check_sees_a_child_that_fails() -> None:
    def fail() -> None:
        os._exit(3)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(fail), 0)[1]) == 3


def test_a_blocking_renderer_renders_in_the_child_on_a_thread_of_the_child() -> None:
    messages = user(text("hi"))
    with BlockingServerRenderer(ServerRenderer(RenderingServer())) as renderer:
        before = renderer.render(messages).token_ids

        def check() -> None:
            assert renderer.render(messages).token_ids == before
            renderer.close()

        assert os.waitpid(fork(check), 0)[1] == 0
        assert renderer.render(messages).token_ids == before
