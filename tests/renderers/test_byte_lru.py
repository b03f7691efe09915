"""The cache bounded in bytes against a model of it, and with many threads."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from renderers.process.caches import ByteLRU

STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "put", "pop", "evict_to"]), st.integers(0, 5), st.integers(0, 12)), max_size=60
)


@given(STEPS)
def test_the_least_recently_used_entries_are_evicted_until_the_rest_fits(steps: list[tuple[str, int, int]]) -> None:
    cache, model = ByteLRU[int, int](10), dict[int, int]()  # the model: key -> bytes, in order of use
    for step, key, nbytes in steps:
        expected = []
        if step == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        elif step == "pop":
            assert cache.pop(key) == model.pop(key, None)
        else:
            limit = nbytes if step == "evict_to" else 10
            if step == "put":
                model.pop(key, None)
                if nbytes <= limit:
                    model[key] = nbytes
            while sum(model.values()) > limit:
                oldest = next(iter(model))
                expected.append((oldest, model.pop(oldest)))
            assert (cache.put(key, nbytes, nbytes) if step == "put" else cache.evict_to(limit)) == expected
        assert cache.nbytes == sum(model.values()) <= 10
        assert len(cache) == len(model)
        assert all((key in cache) == (key in model) for key in range(6))


def test_a_value_that_is_replaced_can_be_read_all_the_time() -> None:
    cache = ByteLRU[str, int](10)
    cache.put("key", 1, 1)

    def replace() -> None:
        for number in range(1, 20_000):
            cache.put("key", number, 1 + number % 9)

    thread = threading.Thread(target=replace)
    thread.start()
    misses = 0
    while thread.is_alive():
        misses += cache.get("key") is None
    thread.join()
    assert misses == 0


def test_threads_keep_the_byte_count_right() -> None:
    cache = ByteLRU[int, int](50)

    def work(seed: int) -> None:
        for step in range(3000):
            key = (step * 7 + seed) % 40
            cache.put(key, key, key % 9)
            assert cache.get((key * 3) % 40) in (None, (key * 3) % 40)
            if step % 5 == 0:
                cache.pop(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.nbytes <= 50
    assert cache.nbytes == sum(key % 9 for key in range(40) if key in cache)


class _ReadWhileEvicting(ByteLRU[str, int]):
    """Asks for the number of bytes in another thread whenever it is about to evict."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.seen: list[int] = []
        self.readers: list[threading.Thread] = []

    def _evict_to(self, max_bytes: int) -> list[tuple[str, int]]:
        reader = threading.Thread(target=lambda: self.seen.append(self.nbytes))
        reader.start()
        reader.join(0.1)  # a reader that does not wait for the eviction has ended by then
        self.readers.append(reader)
        return super()._evict_to(max_bytes)


def test_no_thread_sees_more_bytes_than_the_bound_while_a_value_is_added() -> None:
    cache = _ReadWhileEvicting(10)
    cache.put("first", 1, 6)
    cache.put("second", 2, 7)
    for reader in cache.readers:
        reader.join()
    assert len(cache.seen) == 2
    assert max(cache.seen) <= 10


def test_a_value_that_is_freed_within_a_call_may_call_the_cache() -> None:
    cache = ByteLRU[int, object](10)
    found: list[object] = []

    class Value:
        def __del__(self) -> None:
            found.append(cache.get(2))

    cache.put(2, 2, 1)
    cache.put(1, Value(), 1)
    cache.put(1, 1, 1)
    assert found == [2]
