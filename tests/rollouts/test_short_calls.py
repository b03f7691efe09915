"""Which calls of a renderer are made on the event loop, and how many of them between two looks at what else is due."""

import asyncio
import io
import threading
import time

import pytest
from PIL import Image

from renderers import MediaPolicy, RendererPool, load_renderer
from rollouts import SamplingParams, StepResult, run_episode
from rollouts.episodes import calls as short_calls
from rollouts.episodes.calls import ShortCalls
from rollouts.testing import ScriptedEngine

MANY = 200


def on_loop():
    return threading.current_thread() is threading.main_thread()


def slow():
    """Takes 5 ms of processor time; whether it ran on the event loop."""
    began = time.thread_time()
    while time.thread_time() < began + 0.005:
        pass
    return on_loop()


class Foreign:
    """A renderer of another package."""

    def __init__(self, renderer):
        self._renderer = renderer

    def __getattr__(self, name):
        return getattr(self._renderer, name)

    def render(self, *args, **options):
        return self._renderer.render(*args, **options)

    def render_ids(self, *args, **options):
        return self._renderer.render_ids(*args, **options)

    def parse_response(self, *args, **options):
        return self._renderer.parse_response(*args, **options)

    def get_stop_token_ids(self):
        return self._renderer.get_stop_token_ids()

    def bridge_to_next_turn(self, *args, **options):
        return self._renderer.bridge_to_next_turn(*args, **options)


async def places(pool, calls):
    """Whether each of four calls ran on the event loop."""
    short = ShortCalls()
    return [await short.run(pool, "kind", 10, calls) for _ in range(4)]


async def after_two_calls(pool):
    """`ShortCalls` that know what a call costs."""
    short = ShortCalls()
    for _ in range(2):
        await short.run(pool, "kind", 10, on_loop)
    return short


@pytest.fixture
def pool(renderer):
    with RendererPool(renderer) as pool:
        yield pool


async def test_the_first_calls_of_a_kind_are_made_on_threads_and_later_short_ones_are_not(pool):
    assert await places(pool, on_loop) == [False, False, True, True]


async def test_of_many_calls_that_are_due_at_once_only_the_first_two_go_to_threads(pool, monkeypatch):
    monkeypatch.setattr(short_calls, "_LONGEST_CALL_SECONDS", 1e9)  # on a loaded machine a call may take long
    short = ShortCalls()
    made_on_loop = await asyncio.gather(*[short.run(pool, "kind", 10, on_loop) for _ in range(MANY)])
    assert made_on_loop == [False] * 2 + [True] * (MANY - 2)


async def test_after_a_first_call_that_fails_the_others_go_to_threads_until_two_have_been_measured(pool, monkeypatch):
    monkeypatch.setattr(short_calls, "_LONGEST_CALL_SECONDS", 1e9)
    short, places = ShortCalls(), []

    def failing():
        places.append(on_loop())
        raise ValueError("no")

    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *[short.run(pool, "kind", 10, failing) for _ in range(MANY)], return_exceptions=True
        )
    assert [str(result) for result in results] == ["no"] * MANY
    assert places == [False] * MANY
    assert [await short.run(pool, "kind", 10, on_loop) for _ in range(4)] == [False, False, True, True]


def test_a_loop_that_was_closed_during_a_first_call_does_not_keep_the_next_one_waiting(pool):
    short, begun, may_end = ShortCalls(), threading.Event(), threading.Event()

    def waiting():
        begun.set()
        assert may_end.wait(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(short.run(pool, "kind", 10, waiting))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert begun.wait(60)
    loop.close()  # without ending its task
    may_end.set()
    assert asyncio.run(asyncio.wait_for(short.run(pool, "kind", 10, on_loop), 60)) is False
    task._log_destroy_pending = False  # it is never run again


async def test_a_first_call_that_is_cancelled_lets_the_others_begin(pool):
    short, begun, may_end = ShortCalls(), threading.Event(), threading.Event()

    def waiting():
        begun.set()
        assert may_end.wait(60)

    first = asyncio.create_task(short.run(pool, "kind", 10, waiting))
    others = [asyncio.create_task(short.run(pool, "kind", 10, on_loop)) for _ in range(MANY)]
    assert await asyncio.to_thread(begun.wait, 60)
    assert not any(other.done() for other in others)
    others[0].cancel()  # one that waits
    first.cancel()
    await asyncio.wait([first])
    may_end.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*others[1:])
    assert first.cancelled()
    assert others[0].cancelled()


async def test_calls_that_take_long_stay_on_threads(pool):
    assert await places(pool, slow) == [False] * 4


async def test_a_call_that_is_large_for_its_kind_is_made_on_a_thread(pool):
    short = await after_two_calls(pool)
    assert await short.run(pool, "kind", 10, on_loop)
    assert not await short.run(pool, "kind", 10**9, on_loop)


async def test_calls_that_become_expensive_go_back_to_threads(pool):
    short = await after_two_calls(pool)
    assert [await short.run(pool, "kind", 10, slow) for _ in range(10)][-1] is False


async def test_a_renderer_of_another_package_is_called_on_threads_only(renderer):
    with RendererPool(Foreign(renderer)) as pool:
        assert await places(pool, on_loop) == [False] * 4


async def test_renderers_that_threads_do_not_share_are_called_on_threads_only(renderer):
    with RendererPool(lambda: renderer, 2) as pool:
        assert await places(pool, on_loop) == [False] * 4


async def other_work(order):
    """What else runs on the event loop: appends "loop" each time."""
    while len(order) < 2 * MANY:
        order.append("loop")
        await asyncio.sleep(0)


async def test_the_loop_looks_at_what_else_is_due_after_a_few_calls(pool, monkeypatch):
    # On a loaded machine a call may take long.
    monkeypatch.setattr(short_calls, "_LONGEST_CALL_SECONDS", 1e9)
    monkeypatch.setattr(short_calls, "_SECONDS_AT_ONCE", 1e9)
    short = await after_two_calls(pool)
    order = []
    calls = [short.run(pool, "kind", 10, lambda: order.append("call")) for _ in range(MANY)]
    await asyncio.gather(other_work(order), *calls)
    runs = "".join(each[0] for each in order).split("l")
    assert order.count("call") == MANY
    assert max(map(len, runs)) <= 2 * short_calls._CALLS_AT_ONCE
    assert sum(bool(run) for run in runs) >= MANY / (2 * short_calls._CALLS_AT_ONCE)


async def test_the_loop_looks_at_what_else_is_due_sooner_after_calls_that_take_longer(pool, monkeypatch):
    monkeypatch.setattr(short_calls, "_LONGEST_CALL_SECONDS", 1e9)
    monkeypatch.setattr(short_calls, "_SECONDS_AT_ONCE", 1e-9)  # every call takes longer
    short = await after_two_calls(pool)
    order = []
    calls = [short.run(pool, "kind", 10, lambda: order.append("call")) for _ in range(MANY)]
    await asyncio.gather(other_work(order), *calls)
    assert order.count("call") == MANY
    assert ["call"] * 3 not in [order[index : index + 3] for index in range(len(order))]


async def test_a_cancelled_call_does_not_run_and_does_not_keep_others_waiting(pool):
    short = await after_two_calls(pool)
    made = []
    tasks = [
        asyncio.create_task(short.run(pool, "kind", 10, lambda number=number: made.append(number)))
        for number in range(MANY)
    ]
    await asyncio.sleep(0)
    for task in tasks[MANY // 2 :: 2]:
        task.cancel()
    await asyncio.wait(tasks)
    cancelled = {number for number, task in enumerate(tasks) if task.cancelled()}
    assert cancelled == set(range(MANY // 2, MANY, 2))
    assert made == [number for number in range(MANY) if number not in cancelled]


async def test_an_error_of_a_short_call_is_raised_and_the_next_call_works(pool):
    short = await after_two_calls(pool)
    with pytest.raises(ZeroDivisionError):
        await short.run(pool, "kind", 10, lambda: 1 / 0)
    assert await short.run(pool, "kind", 10, on_loop)


def image(color):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), color).save(buffer, "PNG")
    return [{"type": "image", "image": buffer.getvalue()}, {"type": "text", "text": "Go on."}]


def places_of_bridges(model_dir, contents):
    """For each of the contents of the messages after the first turn, whether it was added on the event loop."""
    renderer = load_renderer(model_dir)
    bridge, places = renderer.bridge_to_next_turn, []
    renderer.bridge_to_next_turn = lambda *args, **options: places.append(on_loop()) or bridge(*args, **options)

    class Turns:
        def reset(self, seed):
            self.contents = iter(contents)
            return [{"role": "user", "content": "Begin."}]

        def step(self, assistant):
            content = next(self.contents, None)
            messages = [] if content is None else [{"role": "user", "content": content}]
            return StepResult(messages, done=content is None)

    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    turns = len(contents) + 1
    episode = run_episode(Turns(), engine=engine, renderer=renderer, sampling=SamplingParams(), max_turns=turns)
    assert asyncio.run(episode).done
    return places


@pytest.fixture
def every_known_call_is_short(monkeypatch):
    """On a loaded machine a call may take long."""
    monkeypatch.setattr(short_calls, "_LONGEST_CALL_SECONDS", 1e9)


@pytest.mark.usefixtures("every_known_call_is_short")
def test_messages_of_text_are_added_on_the_loop_as_strings_and_as_parts(tiny_model_dir):
    parts = [{"type": "text", "text": "Go on."}]
    assert places_of_bridges(tiny_model_dir, ["Go on.", "Go on.", "Go on.", parts]) == [False, False, True, True]


@pytest.mark.usefixtures("every_known_call_is_short")
def test_an_image_is_added_on_the_loop_only_if_it_was_processed_before(tiny_model_dir):
    red, blue = image("red"), image("blue")
    assert places_of_bridges(tiny_model_dir, [red, red, red, red, blue, blue]) == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]


def test_an_image_at_a_path_does_not_count_as_processed(tiny_model_dir, tmp_path):
    """Its file would have to be looked at, which may take as long as its disk does."""
    path = tmp_path / "red.png"
    path.write_bytes(image("red")[0]["image"])
    messages = [{"role": "user", "content": [{"type": "image", "image": str(path)}]}]
    renderer = load_renderer(tiny_model_dir, media_policy=MediaPolicy(allowed_directories=(tmp_path,)))
    renderer.render(messages)
    assert not renderer.has_processed(messages)
