"""What a runner does with a pool of renderers."""

import pytest
from runner_world import make_runner, tasks

from renderers import RendererPool
from rollouts.testing import ScriptedEngine


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_pool_that_was_given_is_used_and_stays_open(renderer, threads):
    async with RendererPool(renderer, threads=threads) as pool:
        for _ in range(2):
            async with make_runner(pool, engine=ScriptedEngine(lambda _: "yes", renderer=renderer)) as runner:
                assert len([group async for group in runner.stream(tasks(3))]) == 3
        assert await pool.render_async([{"role": "user", "content": "?"}])
