"""RendererPool: the results of its renderer, off the event loop, with many threads and several loops."""

import asyncio
import functools
import threading
from typing import Any

import corpus
import numpy as np
import pytest

from renderers import MultimodalRenderer, RenderedTokens, Renderer, TemplateRenderer, is_multimodal, load_renderer
from renderers.errors import RendererError
from renderers.pool import RendererPool

MESSAGES = [corpus.user("Hi")]


@functools.cache
def qwen() -> TemplateRenderer:
    return fresh_qwen()


def fresh_qwen() -> TemplateRenderer:
    return load_renderer(corpus.model_dir("qwen-3"), chat_template=corpus.templates()["trl/qwen3_instruct_2507"])


class Gate:
    """A renderer that waits inside `render` until `open` is set, and counts the calls inside."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls: list[Any] = []
        self.inside = 0
        self.most_inside = 0
        self._lock = threading.Lock()

    def render(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> RenderedTokens:
        with self._lock:
            self.calls.append(messages)
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        self.entered.release()
        assert self.open.wait(30)
        with self._lock:
            self.inside -= 1
        return RenderedTokens([len(self.calls)])

    def render_ids(self, messages: Any, **options: Any) -> list[int]:
        return self.render(messages).token_ids

    def parse_response(self, token_ids: Any, *, tools: Any = None, prompt_ids: Any = None) -> Any:
        raise NotImplementedError

    def get_stop_token_ids(self) -> list[int]:
        return [7]

    def bridge_to_next_turn(
        self, prompt: Any, completion: Any, new: Any, *, tools: Any = None, previous_messages: Any = None
    ) -> None:
        return None


async def entered(gate: Gate, count: int = 1) -> None:
    """Wait until `count` more calls are inside `render`."""
    for _ in range(count):
        assert await asyncio.to_thread(gate.entered.acquire, True, 30)


def test_a_pool_is_a_renderer_and_is_multimodal_if_its_renderer_is(renderer: TemplateRenderer) -> None:
    with RendererPool(renderer) as seeing, RendererPool(qwen()) as reading, RendererPool(Gate()) as plain:
        assert isinstance(seeing, Renderer)
        assert isinstance(seeing, MultimodalRenderer)
        assert is_multimodal(seeing)
        assert seeing.mm_token_type_id_map == renderer.mm_token_type_id_map
        for blind in (reading, plain):
            assert not is_multimodal(blind)
            assert blind.mm_token_type_id_map == {}


async def test_a_closed_pool_refuses_new_calls_and_finishes_earlier_ones() -> None:
    gate = Gate()
    pool = RendererPool(gate, threads=1)
    working = asyncio.ensure_future(pool.render_async(["working"]))
    await entered(gate)
    waiting = asyncio.ensure_future(pool.render_async(["waiting"]))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(pool.aclose())
    await asyncio.sleep(0)
    with pytest.raises(RendererError, match="RendererPool is closed"):
        await pool.render_async(MESSAGES)
    assert not closing.done()
    gate.open.set()
    await closing
    assert len(await working) == len(await waiting) == 1
    with pytest.raises(RendererError, match="RendererPool is closed"):
        await pool.render_async(MESSAGES)
    await pool.aclose()
    pool.close()
    assert gate.calls == [["working"], ["waiting"]]


async def test_closing_without_waiting_raises_pool_closed_error_in_calls_that_have_not_begun() -> None:
    gate = Gate()
    pool = RendererPool(gate, threads=1)
    calls = [asyncio.ensure_future(pool.render_async(MESSAGES)) for _ in range(3)]
    await asyncio.to_thread(gate.entered.acquire)
    pool.close(wait=False)
    gate.open.set()
    first, *others = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert isinstance(first, RenderedTokens)
    assert ["this RendererPool is closed" in str(other) for other in others] == [True, True]


# Pools of several renderers.


def test_a_function_is_called_once_for_each_of_the_renderers() -> None:
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        return made[-1]

    with RendererPool(make, 3) as pool:
        assert len(made) == pool.size == 3
        assert pool.renderer_cls is Gate
        assert not pool.is_multimodal
        assert pool.supports_tools
        with pool.checkout() as first, pool.checkout() as second, pool.checkout() as third:
            assert {id(first), id(second), id(third)} == set(map(id, made))
        with pool.checkout() as again:
            assert again in made


async def test_a_renderer_that_the_pool_made_is_used_by_one_call_at_a_time() -> None:
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        return made[-1]

    async with RendererPool(make, 2) as pool:
        calls = [asyncio.create_task(pool.render_async(MESSAGES)) for _ in range(5)]
        for gate in made:
            await entered(gate)
        for gate in made:
            gate.open.set()
        await asyncio.gather(*calls)
    assert [gate.most_inside for gate in made] == [1, 1]
    assert sum(len(gate.calls) for gate in made) == 5


def test_a_pool_passes_process_multimodal_on_to_its_renderer(renderer: TemplateRenderer) -> None:
    image = {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)}
    question = [corpus.user([image])]
    with RendererPool(renderer) as pool, RendererPool(Gate()) as plain:
        assert pool.supports_process_multimodal
        assert not plain.supports_process_multimodal
        prompt = pool.render(question, add_generation_prompt=True, process_multimodal=False)
        assert prompt == renderer.render(question, add_generation_prompt=True, process_multimodal=False)
        assert pool.render_ids(question, add_generation_prompt=True, process_multimodal=False) == prompt.token_ids
        stop = renderer.get_stop_token_ids()[:1]
        bridged = pool.bridge_to_next_turn(prompt.token_ids, stop, question, process_multimodal=False)
        assert bridged is not None
        assert bridged.token_ids[: len(prompt.token_ids)] == prompt.token_ids


@pytest.mark.parametrize("error", [StopIteration, asyncio.CancelledError])
async def test_a_renderer_that_raises_what_coroutines_understand_otherwise_is_named(error: type[BaseException]) -> None:
    class Raising(Gate):
        def render(self, messages: Any, **options: Any) -> RenderedTokens:
            raise error

    async with RendererPool(Raising()) as pool:
        with pytest.raises(RuntimeError, match=f"the renderer raised {error.__name__}"):
            await asyncio.wait_for(pool.render_async(MESSAGES), 30)
