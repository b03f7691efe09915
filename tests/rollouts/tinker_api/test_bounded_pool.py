"""Things that are made at first use: how many there are, and which one ends."""

from __future__ import annotations

import asyncio
from collections import Counter

from rollouts.tinker.bounded_pool import BoundedPool


class Things:
    """Records what is there, and what was made."""

    def __init__(self, limit):
        self.pool = BoundedPool(limit, self.make, self.end)
        self.there, self.made, self.limit = set(), [], limit

    async def make(self, key):
        assert key not in self.there
        assert len(self.there) < self.limit
        self.made.append(key)
        await asyncio.sleep(0)
        self.there.add(key)
        return key.upper()

    async def end(self, key, value):
        assert value == key.upper()
        await asyncio.sleep(0)
        self.there.remove(key)


async def test_the_one_that_was_not_used_for_the_longest_time_ends_and_is_made_again_on_demand():
    things = Things(2)
    for key in ("a", "b", "a", "c", "b"):
        async with things.pool.using(key) as value:
            assert value == key.upper()
    assert things.made == ["a", "b", "c", "b"]
    assert things.there == {"b", "c"}
    await things.pool.close()
    assert not things.there


async def test_many_users_at_once_never_exceed_the_limit_and_all_get_theirs():
    things = Things(3)
    got = Counter()

    async def use(key):
        async with things.pool.using(key) as value:
            await asyncio.sleep(0)
            assert key in things.there
            got[value] += 1

    await asyncio.gather(*(use("abcdefg"[number % 7]) for number in range(210)))
    assert set(got.values()) == {30}


async def test_one_that_always_has_users_does_not_keep_a_further_one_waiting():
    things = Things(1)
    first, second, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done.set()

    async def use(key, until):
        async with things.pool.using(key):
            await until.wait()

    one, further, other = (asyncio.create_task(use(*each)) for each in (("a", first), ("b", done), ("a", second)))
    for _ in range(10):
        await asyncio.sleep(0)
    first.set()
    await asyncio.wait_for(further, 60)  # the second user of "a" has not begun, or it would be waited for
    second.set()
    await asyncio.gather(one, other)
    assert things.made == ["a", "b", "a"]
