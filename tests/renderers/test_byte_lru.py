"""The cache bounded in bytes against a model of it, and with many threads."""

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
        if step == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model[key] = model.pop(key)
        elif step == "pop":
            cache.pop(key)
            model.pop(key, None)
        else:
            limit = nbytes if step == "evict_to" else 10
            if step == "put":
                model.pop(key, None)
                if nbytes <= limit:
                    model[key] = nbytes
            while sum(model.values()) > limit:
                model.pop(next(iter(model)))
            if step == "put":
                cache.put(key, nbytes, nbytes)
            else:
                cache.evict_to(limit)
        assert cache.nbytes == sum(model.values()) <= 10
        assert len(cache) == len(model)
        assert all((key in cache) == (key in model) for key in range(6))


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
