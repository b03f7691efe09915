"""The model of a server's media cache: the data of an item is sent by one request and kept by the server."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.vllm.server_media_cache import ServerMediaCache

A, B = {"a": 10}, {"b": 10}


async def test_a_waiting_request_that_is_cancelled_disturbs_nobody():
    cache = ServerMediaCache()
    carrier = await cache.reserve(A)
    leaving, staying = (asyncio.ensure_future(cache.reserve(A)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    cache.commit(carrier)
    assert (await asyncio.wait_for(staying, 5)).omitted == {"a"}


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcdef"), min_size=1), st.sampled_from(["commit", "release", "evict", "clear"])
        ),
        max_size=30,
    )
)
def test_nothing_is_omitted_that_a_server_of_the_same_size_has_not_been_sent(uses):
    """A server that caches more than the model believes never misses, except after it was cleared unseen."""

    async def play() -> None:
        cache = ServerMediaCache(max_bytes=3)
        server: set[str] = set()
        for names, outcome in uses:
            reservation = await cache.reserve(dict.fromkeys(sorted(names), 1))
            assert reservation.omitted <= server
            assert reservation.included | reservation.omitted == names
            if outcome == "commit":
                server |= reservation.included
                cache.commit(reservation)
            elif outcome == "evict":
                server -= reservation.omitted
                cache.evict(reservation)
            else:
                cache.release(reservation)
            if outcome == "clear":
                server.clear()
                cache.clear()

    asyncio.run(play())


async def test_what_a_stream_says_later_does_not_land_the_image_of_another():
    cache = ServerMediaCache()
    first = await cache.reserve({"cat": 1})
    cache.commit(first)
    cache.evict(await cache.reserve({"cat": 1}))
    second = await cache.reserve({"cat": 1})
    assert second.included == {"cat"}
    cache.commit(first)  # its next token
    waiting = asyncio.ensure_future(cache.reserve({"cat": 1}))
    await asyncio.sleep(0)
    assert not waiting.done()
    cache.commit(second)
    assert (await waiting).omitted == {"cat"}
