"""What a runner does with its renderer: threads, shared images, renderers of text models."""

import asyncio
import io
import threading

import pytest
from PIL import Image
from runner_world import Counting, make_runner, run_groups, tasks

from renderers import RendererPool, load_renderer
from rollouts import StepResult
from rollouts.testing import ScriptedEngine


class Recording:
    """Calls another renderer, and keeps on which threads; a renderer of text, which accepts no media."""

    def __init__(self, renderer):
        self._renderer = renderer
        self.tokenizer = renderer.tokenizer
        self.threads = set()

    def _called(self):
        self.threads.add(threading.current_thread())

    def render(self, messages, *, tools=None, add_generation_prompt=False):
        self._called()
        return self._renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def render_ids(self, messages, *, tools=None, add_generation_prompt=False):
        return self._renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        self._called()
        return self._renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def get_stop_token_ids(self):
        return self._renderer.get_stop_token_ids()

    def bridge_to_next_turn(
        self, previous_prompt_ids, previous_completion_ids, new_messages, *, tools=None, previous_messages=None
    ):
        self._called()
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids, previous_completion_ids, new_messages, tools=tools, previous_messages=previous_messages
        )


def test_the_renderer_works_on_threads_and_never_on_that_of_the_event_loop(renderer):
    recording = Recording(renderer)
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    groups, _ = run_groups(recording, tasks(4), engine=engine, group_size=2)
    assert all(episode.done for group in groups.values() for episode in group.episodes)
    assert recording.threads
    assert threading.main_thread() not in recording.threads


def test_the_image_of_a_prompt_is_processed_once_for_the_episodes_of_a_group(tiny_model_dir):
    renderer = load_renderer(tiny_model_dir)
    processor = renderer.processors["image"]
    process, processed = processor.process, []
    processor.process = lambda source: processed.append(source.digest) or process(source)
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "PNG")

    class Showing(Counting):
        def reset(self, seed):
            return [{"role": "user", "content": [{"type": "image", "image": buffer.getvalue()}]}]

        def step(self, assistant):
            return StepResult(done=True)

    groups, _ = run_groups(renderer, tasks(3), Showing, group_size=8)
    assert all(len(list(episode.all_media())) == 1 for group in groups.values() for episode in group.episodes)
    assert len(processed) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pool_that_was_given_is_used_and_stays_open(renderer, threads):
    async def world():
        async with RendererPool(renderer, threads=threads) as pool:
            for _ in range(2):
                async with make_runner(pool, engine=ScriptedEngine(lambda _: "yes", renderer=renderer)) as runner:
                    assert len([group async for group in runner.stream(tasks(3))]) == 3
            assert await pool.render_async([{"role": "user", "content": "?"}])

    asyncio.run(asyncio.wait_for(world(), 60))
