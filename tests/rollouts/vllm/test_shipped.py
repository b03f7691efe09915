"""Which media a server holds: each item is carried once, by one request, for as long as the server keeps it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.vllm.media.shipped import ShippedMedia

A, B = {"a": 10}, {"b": 10}


async def test_an_item_is_carried_once_and_then_named():
    shipped = ShippedMedia()
    first = await shipped.claim(A)
    assert first.carried == {"a"}
    shipped.arrived(first)
    second = await shipped.claim({**A, **B})
    assert second.carried == {"b"}
    assert second.omitted == {"a"}


async def test_of_ten_first_uses_at_once_one_carries_the_item_and_the_others_wait_for_it():
    shipped = ShippedMedia()
    carriers = []

    async def use() -> None:
        shipment = await shipped.claim(A)
        carriers.append(shipment.carried)
        await asyncio.sleep(0)
        shipped.arrived(shipment)

    await asyncio.gather(*(use() for _ in range(10)))
    assert sorted(map(len, carriers)) == [0] * 9 + [1]


async def test_when_the_carrier_fails_one_of_those_who_wait_carries_the_item():
    shipped = ShippedMedia()
    carrier = await shipped.claim(A)
    waiting = [asyncio.ensure_future(shipped.claim(A)) for _ in range(3)]
    await asyncio.sleep(0)
    shipped.failed(carrier)
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (next_carrier,) = done
    assert next_carrier.result().carried == {"a"}
    shipped.arrived(next_carrier.result())
    assert [shipment.carried for shipment in await asyncio.gather(*others)] == [frozenset(), frozenset()]


async def test_what_carries_everything_waits_for_nobody_and_leaves_what_others_carry_on_the_way():
    shipped = ShippedMedia()
    carrier = await shipped.claim(A)
    waiting = asyncio.ensure_future(shipped.claim(A))
    everything = await asyncio.wait_for(shipped.claim({**A, **B}, carry_all=True), 5)
    assert everything.carried == {"a", "b"}
    shipped.failed(everything)
    await asyncio.sleep(0)
    assert not waiting.done()
    shipped.arrived(carrier)
    assert (await asyncio.wait_for(waiting, 5)).omitted == {"a"}


async def test_two_requests_that_share_two_new_items_do_not_wait_for_each_other():
    shipped = ShippedMedia()
    first = await shipped.claim(A)
    both = asyncio.ensure_future(shipped.claim({**B, **A}))
    await asyncio.sleep(0)
    # `both` waits for "a" and so has not taken "b", which this request may carry.
    second = await asyncio.wait_for(shipped.claim(B), 5)
    assert second.carried == {"b"}
    shipped.arrived(second)
    shipped.arrived(first)
    assert (await asyncio.wait_for(both, 5)).carried == frozenset()


async def test_a_waiting_request_that_is_cancelled_disturbs_nobody():
    shipped = ShippedMedia()
    carrier = await shipped.claim(A)
    leaving, staying = (asyncio.ensure_future(shipped.claim(A)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    shipped.arrived(carrier)
    assert (await asyncio.wait_for(staying, 5)).omitted == {"a"}


async def test_what_a_server_did_not_hold_after_all_is_carried_again():
    shipped = ShippedMedia()
    shipped.arrived(await shipped.claim(A))
    named = await shipped.claim(A)
    shipped.missed(named)
    assert (await shipped.claim(A)).carried == {"a"}


async def test_clearing_the_cache_while_an_item_is_on_the_way_means_that_it_is_not_counted_on():
    shipped = ShippedMedia()
    on_the_way = await shipped.claim(A)
    shipped.forget()
    shipped.arrived(on_the_way)
    assert "a" not in shipped


async def test_the_item_used_longest_ago_is_forgotten_when_the_bytes_are_used_up():
    shipped = ShippedMedia(max_bytes=25)
    for names in (A, B, A, {"c": 10}):
        shipped.arrived(await shipped.claim(names))
    assert [name in shipped for name in "abc"] == [True, False, True]


async def test_an_item_larger_than_the_cache_is_carried_every_time():
    shipped = ShippedMedia(max_bytes=5)
    for _ in range(2):
        shipment = await shipped.claim(A)
        assert shipment.carried == {"a"}
        shipped.arrived(shipment)


def test_requests_of_several_event_loops_share_what_is_shipped():
    shipped = ShippedMedia()
    carried = []

    async def use() -> None:
        shipment = await shipped.claim(A)
        await asyncio.sleep(0)
        carried.append(len(shipment.carried))
        shipped.arrived(shipment)

    async def in_threads() -> None:
        await asyncio.gather(*(asyncio.to_thread(asyncio.run, use()) for _ in range(8)))

    asyncio.run(in_threads())
    assert sum(carried) == 1


@given(
    st.lists(
        st.tuples(
            st.sets(st.sampled_from("abcdef"), min_size=1), st.sampled_from(["arrived", "failed", "missed", "forget"])
        ),
        max_size=30,
    )
)
def test_nothing_is_omitted_that_a_server_of_the_same_size_has_not_been_sent(uses):
    """A server that caches more than the model believes never misses, except after it was cleared unseen."""

    async def play() -> None:
        shipped = ShippedMedia(max_bytes=3)
        server: set[str] = set()
        for names, outcome in uses:
            shipment = await shipped.claim(dict.fromkeys(sorted(names), 1))
            assert shipment.omitted <= server
            assert shipment.carried | shipment.omitted == names
            if outcome == "arrived":
                server |= shipment.carried
                shipped.arrived(shipment)
            elif outcome == "missed":
                server -= shipment.omitted
                shipped.missed(shipment)
            else:
                shipped.failed(shipment)
            if outcome == "forget":
                server.clear()
                shipped.forget()

    asyncio.run(play())


async def test_what_a_stream_says_later_does_not_land_the_image_of_another():
    shipped = ShippedMedia()
    first = await shipped.claim({"cat": 1})
    shipped.arrived(first)
    shipped.missed(await shipped.claim({"cat": 1}))
    second = await shipped.claim({"cat": 1})
    assert second.carried == {"cat"}
    shipped.arrived(first)  # its next token
    assert "cat" not in shipped
    shipped.arrived(second)
    assert "cat" in shipped
