"""What a runner does with its renderer: threads, shared images, renderers of text models."""

import io

import pytest
from PIL import Image
from runner_world import Counting, make_runner, run_groups, tasks

from renderers import RendererPool, load_renderer
from rollouts import StepResult
from rollouts.testing import ScriptedEngine


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
async def test_a_pool_that_was_given_is_used_and_stays_open(renderer, threads):
    async with RendererPool(renderer, threads=threads) as pool:
        for _ in range(2):
            async with make_runner(pool, engine=ScriptedEngine(lambda _: "yes", renderer=renderer)) as runner:
                assert len([group async for group in runner.stream(tasks(3))]) == 3
        assert await pool.render_async([{"role": "user", "content": "?"}])
