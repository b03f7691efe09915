"""Which calls of a renderer are made on the event loop, and how many of them between two looks at what else is due."""

import asyncio
import io
import threading

import pytest
from PIL import Image

from renderers import MediaPolicy, RendererPool, load_renderer
from rollouts import SamplingParams, StepResult, run_episode
from rollouts.episodes import calls as short_calls
from rollouts.episodes.calls import RendererCalls, ShortCalls
from rollouts.testing import ScriptedEngine

MANY = 200


def on_loop():
    return threading.current_thread() is threading.main_thread()


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


@pytest.fixture
def pool(renderer):
    with RendererPool(renderer) as pool:
        yield pool


async def known(pool):
    """`ShortCalls` that have made a first call."""
    short = ShortCalls()
    await short.run(pool, "kind", on_loop)
    return short


async def test_the_first_call_of_a_kind_is_made_on_a_thread_and_later_ones_are_not(pool):
    short = ShortCalls()
    kinds = ["a", "a", "b", "a", "b"]
    assert [await short.run(pool, kind, on_loop) for kind in kinds] == [False, True, False, True, True]


async def test_of_many_calls_that_are_due_at_once_only_the_first_goes_to_a_thread(pool):
    short = ShortCalls()
    made_on_loop = await asyncio.gather(*[short.run(pool, "kind", on_loop) for _ in range(MANY)])
    assert made_on_loop == [False] + [True] * (MANY - 1)


async def test_a_first_call_that_fails_or_is_cancelled_lets_the_others_begin(pool):
    short, may_end = ShortCalls(), threading.Event()
    first = asyncio.create_task(short.run(pool, "kind", may_end.wait))
    others = [asyncio.create_task(short.run(pool, "kind", on_loop)) for _ in range(MANY)]
    await asyncio.sleep(0)
    assert not any(other.done() for other in others)
    first.cancel()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*others) == [True] * MANY
    may_end.set()
    assert first.cancelled()


async def other_work(order):
    """What else runs on the event loop: appends "loop" each time."""
    while len(order) < 2 * MANY:
        order.append("loop")
        await asyncio.sleep(0)


async def test_the_loop_looks_at_what_else_is_due_after_a_few_calls(pool):
    short, order = await known(pool), []
    calls = [short.run(pool, "kind", lambda: order.append("call")) for _ in range(MANY)]
    await asyncio.gather(other_work(order), *calls)
    runs = "".join(each[0] for each in order).split("l")
    assert order.count("call") == MANY
    assert max(map(len, runs)) <= 2 * short_calls._CALLS_AT_ONCE
    assert sum(bool(run) for run in runs) >= MANY / (2 * short_calls._CALLS_AT_ONCE)


async def test_a_cancelled_call_does_not_run_and_does_not_keep_others_waiting(pool):
    short, made = await known(pool), []
    tasks = [
        asyncio.create_task(short.run(pool, "kind", lambda number=number: made.append(number)))
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
    short = await known(pool)
    with pytest.raises(ZeroDivisionError):
        await short.run(pool, "kind", lambda: 1 / 0)
    assert await short.run(pool, "kind", on_loop)


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


def test_messages_of_text_are_added_on_the_loop_as_strings_and_as_parts(tiny_model_dir):
    parts = [{"type": "text", "text": "Go on."}]
    assert places_of_bridges(tiny_model_dir, ["Go on.", "Go on.", parts]) == [False, True, True]


def test_a_large_message_is_added_on_a_thread(tiny_model_dir):
    assert places_of_bridges(tiny_model_dir, ["Go on.", "Go on." * 1000, "Go on."]) == [False, False, True]


@pytest.mark.parametrize(
    "messages",
    [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": {"a": ["x" * 5000]}}}],
            }
        ],
        [{"role": "assistant", "content": "", "reasoning_content": "x" * 5000}],
        [{"role": "user", "content": ""}] * 200,
        [{"role": "user", "content": [{"type": "text", "text": "x" * 5000}]}],
    ],
    ids=["arguments of a call", "reasoning", "many messages", "a part"],
)
def test_all_texts_and_the_number_of_messages_count_in_the_size_of_a_call(messages):
    assert short_calls._text_size(messages)[0] > short_calls._LARGEST_SIZE


def test_an_image_is_added_on_the_loop_only_if_it_was_processed_before(tiny_model_dir):
    red, blue = image("red"), image("blue")
    places = places_of_bridges(tiny_model_dir, [red, red, red, blue, blue])
    assert places == [False, False, True, False, True]


@pytest.mark.parametrize(
    "make_pool",
    [lambda renderer: RendererPool(Foreign(renderer)), lambda renderer: RendererPool(lambda: renderer, 2)],
    ids=["of another package", "not shared by threads"],
)
async def test_other_renderers_are_called_on_threads_only(renderer, make_pool, monkeypatch):
    places, parse = [], renderer.parse_response
    recorded = lambda *args, **options: places.append(on_loop()) or parse(*args, **options)  # noqa: E731
    monkeypatch.setitem(vars(renderer), "parse_response", recorded)
    prompt = renderer.render([{"role": "user", "content": "a"}], add_generation_prompt=True)
    with make_pool(renderer) as pool:
        calls = RendererCalls(pool, ShortCalls())
        for _ in range(3):
            await calls.parse([5], None, prompt)
    assert places == [False] * 3


def test_an_image_at_a_path_does_not_count_as_processed(tiny_model_dir, tmp_path):
    """Its file would have to be looked at, which may take as long as its disk does."""
    path = tmp_path / "red.png"
    path.write_bytes(image("red")[0]["image"])
    messages = [{"role": "user", "content": [{"type": "image", "image": str(path)}]}]
    renderer = load_renderer(tiny_model_dir, media_policy=MediaPolicy(allowed_directories=(tmp_path,)))
    renderer.render(messages)
    assert not renderer.has_processed(messages)
