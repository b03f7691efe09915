"""`BlockingServerRenderer`: threads, event loops, and the processors of a trajectory."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rendering_server import (
    RenderingServer,
    image,
    letters,
    picture,
    text,
    user,
)

from rollouts.engines.protocol import Completion, FinishReason
from rollouts.engines.vllm.server_renderer import BlockingServerRenderer, ImageChunk, ServerRenderer, TokenChunk
from rollouts.errors import (
    EngineClosedError,
    InvalidRequestError,
)
from rollouts.training.samples import samples_from_trajectory
from rollouts.trajectory.packed_episodes import pack_episodes
from rollouts.trajectory.tree import Trajectory
from transport import decode, encode


@pytest.fixture
def server():
    return RenderingServer()


@pytest.fixture
def renderer(server):
    return ServerRenderer(server)


# Trajectories.


def test_a_trajectory_keeps_the_sources_and_makes_the_same_items_of_them_again(server):
    with BlockingServerRenderer(ServerRenderer(server)) as blocking:
        messages = user(image(picture(40)), text("which?"))
        prompt = blocking.render(messages)
        episode = Trajectory("episode")
        drawn = Completion(0, np.array([7], np.int32), np.array([-1.0], np.float32), FinishReason.STOP)
        episode.add_turn(prompt, drawn, {"role": "assistant", "content": "that"}, messages=messages)
        received = decode(encode(episode))
        (sample,) = samples_from_trajectory(received, advantage=1.0, processors=blocking.processors)
        ((item, where),) = sample.media
        ((shown, shown_where),) = prompt.multi_modal_data.items_with_ranges()
        assert (item.mm_hash, where) == (shown.mm_hash, shown_where)
        np.testing.assert_array_equal(item["pixel_values"], shown["pixel_values"])
        packed = pack_episodes([episode], pixels="uint8", processors=blocking.processors)
    (sample,) = samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())
    np.testing.assert_array_equal(sample.media[0][0]["pixel_values"], shown["pixel_values"])


async def test_a_processor_has_what_rendering_asks_of_one(server):
    blocking = BlockingServerRenderer(ServerRenderer(server))
    (processor,) = (await asyncio.to_thread(lambda: blocking.processors)).values()
    assert processor.marker == "<|image_pad|>"
    rendered = await asyncio.to_thread(blocking.render_chunks, [ImageChunk(picture(41))])
    ((item, _),) = rendered.multi_modal_data.items_with_ranges()
    assert await asyncio.to_thread(processor.mm_hash, item.source) == item.mm_hash
    blind = BlockingServerRenderer(ServerRenderer(RenderingServer(takes_images=False)))
    assert await asyncio.to_thread(lambda: blind.processors) == {}
    for one in (blocking, blind):
        one.close()


# Several loops and threads.


async def test_a_cancelled_caller_leaves_the_image_to_the_others(server):
    server.delay = 0.05
    renderer = ServerRenderer(server)
    await renderer.render(user(text("known by now")))
    first = asyncio.create_task(renderer.render_chunks([ImageChunk(picture(30))]))
    second = asyncio.create_task(renderer.render_chunks([ImageChunk(picture(30))]))
    await asyncio.sleep(0.03)
    first.cancel()
    rendered = await second
    assert len(rendered.multi_modal_data) == 1
    assert server.images_rendered().total() == 1


def test_the_blocking_renderer_serves_many_threads_at_once_on_one_loop(server):
    server.delay = 0.1
    blocking = BlockingServerRenderer(ServerRenderer(server))
    before = set(threading.enumerate())
    with ThreadPoolExecutor(8) as pool:
        rendered = list(pool.map(lambda n: blocking.render(user(text(str(n)))).token_ids, range(8)))
    assert rendered == [letters(f"user\n{n}") for n in range(8)]
    blocking.close()
    blocking.close()
    assert not set(threading.enumerate()) - before
    with pytest.raises(EngineClosedError):
        blocking.render(user(text("a")))


async def test_the_blocking_renderer_refuses_to_stop_an_event_loop_but_works_beside_one(server):
    with BlockingServerRenderer(ServerRenderer(server)) as blocking:
        with pytest.raises(InvalidRequestError, match="running event loop"):
            blocking.render(user(text("a")))
        rendered = await asyncio.to_thread(blocking.render_chunks, [TokenChunk([1]), ImageChunk(picture(32))])
    assert len(rendered) == 7


def test_closing_the_blocking_renderer_ends_the_calls_that_wait(server):
    server.delay = 30
    blocking = BlockingServerRenderer(ServerRenderer(server))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(blocking.render, user(text("a")))
        while blocking._loop is None:
            pass
        threading.Event().wait(0.1)
        blocking.close()
        with pytest.raises(EngineClosedError):
            waiting.result(timeout=10)
